/**
 * What a page must know after a reload, in one value of web storage, so that one write changes all of it at once: a
 * call leaves in the same write as its last position.
 */

import { StorageFailed } from './errors.js';
import type { Id, Message } from './wire.js';

/** As much of `Storage` as is needed. */
export interface KeyValue {
  getItem(key: string): string | null;
  setItem(key: string, value: string): void;
  removeItem(key: string): void;
}

/** A running call. Without a position it has left, and nothing has come back yet. */
export interface KeptCall {
  id: Id;
  token?: Id;
  method: string;
  params?: unknown;
  position?: string;
}

export interface State {
  v: 1;
  /** Names the lock that tells a reloaded page from a duplicated one. */
  tab: string;
  /** How many pages have gone on with it; the number in front of request ids. */
  life: number;
  session?: string;
  version?: string;
  handshake?: { params: unknown; result: unknown };
  standalone?: string;
  /** By their ids on the wire. */
  calls: Record<string, KeptCall>;
  /** Requests of the server's that nobody has answered yet, by their ids. */
  asks: Record<string, Message>;
}

/** Beyond, the oldest are forgotten: it is as many as a server keeps for a session. */
export const MAX_CALLS = 100;

export const fresh = (): State => ({
  v: 1,
  tab: Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, '0')).join(''),
  life: 0,
  calls: {},
  asks: {},
});

/** The stored value, if it is one of ours. */
export function parse(text: string | null): State | undefined {
  try {
    const state = JSON.parse(text ?? '') as State | null;
    const sound = state?.v === 1 && typeof state.tab === 'string' && Number.isSafeInteger(state.life);
    return sound && state.calls && state.asks ? state : undefined;
  } catch {
    return undefined;
  }
}

export class Keeper {
  state: State = fresh();
  #broken = false;

  constructor(
    private readonly storage: KeyValue | undefined,
    readonly key: string,
    private readonly onerror: (error: Error) => void,
  ) {}

  /** What an earlier page has left. */
  load(): State | undefined {
    try {
      return parse(this.storage?.getItem(this.key) ?? null);
    } catch (error) {
      this.#fail('be read', error);
      return undefined;
    }
  }

  save(): void {
    const ids = Object.keys(this.state.calls);
    for (const id of ids.slice(0, -MAX_CALLS)) delete this.state.calls[id];
    if (!this.storage) return;
    try {
      this.storage.setItem(this.key, JSON.stringify(this.state));
      this.#broken = false;
    } catch (error) {
      this.#saveLess(error);
    }
  }

  /** Nothing of it may be found by the next page. */
  clear(): void {
    this.state = { ...fresh(), tab: this.state.tab, life: this.state.life };
    try {
      this.storage?.removeItem(this.key);
    } catch (error) {
      this.#fail('be written', error);
    }
  }

  /** Arguments of calls are the large part, and only there to be shown. */
  #saveLess(error: unknown): void {
    const calls = Object.entries(this.state.calls).map(([id, { params: _, ...call }]) => [id, call] as const);
    try {
      this.storage?.setItem(this.key, JSON.stringify({ ...this.state, calls: Object.fromEntries(calls) }));
    } catch {
      // An old position would make the next page show events twice: rather nothing than that.
      try {
        this.storage?.removeItem(this.key);
      } catch {
        // Forbidden altogether: nothing is stored.
      }
      this.#fail('be written', error);
    }
  }

  #fail(what: string, cause: unknown): void {
    if (!this.#broken) this.onerror(new StorageFailed(`web storage cannot ${what}: a reload will not go on`, { cause }));
    this.#broken = true;
  }
}
