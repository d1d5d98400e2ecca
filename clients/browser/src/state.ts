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

/** The state, and where it is stored. */
export interface Kept {
  state: State;
  storage: KeyValue | undefined;
  readonly key: string;
  /** Storage did not take it, and the page was told. */
  broken?: boolean;
  /** What is stored is no longer this page's affair, but the next one's. */
  gone(): boolean;
  report(error: unknown): void;
}

/** Of each kind. Beyond, the oldest are forgotten: it is as many calls as a server keeps for a session. */
export const MOST = 100;

export const fresh = (): State => ({
  v: 1,
  tab: crypto.getRandomValues(new Uint32Array(4)).join(''),
  life: 0,
  calls: {},
  asks: {},
});

/** The stored value, if it is one of ours. */
export function parse(text: string | null | undefined): State | undefined {
  try {
    const state = JSON.parse(text ?? '') as State | null;
    const sound = state?.v === 1 && typeof state.tab === 'string' && Number.isSafeInteger(state.life);
    return sound && state.calls && state.asks ? state : undefined;
  } catch {
    return undefined;
  }
}

/** What a page has left here. */
export function load({ storage, key }: Kept): State | undefined {
  try {
    return parse(storage?.getItem(key));
  } catch {
    return undefined; // who may not read may not write either, and is told then
  }
}

export function save(kept: Kept): void {
  const { state, storage, key } = kept;
  for (const some of [state.calls, state.asks]) for (const id of Object.keys(some).slice(0, -MOST)) delete some[id];
  if (kept.gone()) return;
  try {
    try {
      storage?.setItem(key, JSON.stringify(state));
    } catch {
      storage?.setItem(key, JSON.stringify({ ...state, calls: withoutParams(state.calls) }));
    }
    kept.broken = false;
  } catch (cause) {
    // An old position would make the next page show events twice: rather nothing than that.
    remove(kept);
    if (!kept.broken) kept.report(new StorageFailed('web storage is full: a reload will not go on', { cause }));
    kept.broken = true;
  }
}

/** Nothing of it may be found by the next page. */
export function clear(kept: Kept): void {
  const { tab, life } = kept.state;
  kept.state = { ...fresh(), tab, life };
  remove(kept);
}

function remove({ storage, key }: Kept): void {
  try {
    storage?.removeItem(key);
  } catch {
    // Forbidden altogether: nothing is stored.
  }
}

/** Arguments of calls are the large part, and only there to be shown. */
const withoutParams = (calls: State['calls']): object =>
  Object.fromEntries(Object.entries(calls).map(([id, { params: _, ...call }]) => [id, call]));
