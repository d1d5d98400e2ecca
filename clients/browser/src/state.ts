/**
 * What a page must know after a reload, in one value of web storage, so that one write changes all of it at once: a
 * call leaves in the same write as its last position.
 */

import { StorageFailed } from './errors.js';
import { tried } from './tried.js';
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
  token?: Id | undefined;
  method: string;
  params?: Record<string, unknown> | undefined;
  position?: string | undefined;
  /** Of a call without a session (2026-07-28): the headers that its arguments want. */
  headers?: Readonly<Record<string, string>>;
  /** By which the server knows it, however often it comes. */
  key?: string | undefined;
  /** When it was sent: servers forget keys. */
  began?: number;
  /** The handle of the task that it became. */
  task?: string;
  /** The client gave it up, and the server has not confirmed that yet. */
  cancelled?: boolean;
}

export interface State {
  v: 1;
  /** Names the lock that tells a reloaded page from a duplicated one. */
  tab: string;
  /** How many pages have gone on with it; the number in front of request ids. */
  life: number;
  session?: string;
  version?: string;
  handshake?: { params: Record<string, unknown>; result: unknown };
  standalone?: string;
  /** By their ids on the wire. */
  calls: Record<string, KeptCall>;
  /** Requests of the server that have no answer yet, by their ids. */
  asks: Record<string, Message>;
}

/** The state, and where it is stored. */
export interface Kept {
  state: State;
  storage: KeyValue | undefined;
  readonly key: string;
  /** Why storage did not take it; the page was told. */
  broken?: unknown;
  /** Then what is stored is the next page's affair, or the next transport's. */
  closed?: boolean;
  readonly page: { leaving: boolean };
  report(error: unknown): void;
}

/** Of each kind. Beyond, the oldest are forgotten: it is as many calls as a server keeps for a session. */
export const MOST = 100;

export const fresh = (): State => ({
  v: 1,
  tab: String(Math.random()),
  life: 0,
  calls: {},
  asks: {},
});

/** What a page has left here, if it is whole. Who may not read may not write either, and is told then. */
export function load({ storage, key }: Kept): State | undefined {
  const state = tried(() => JSON.parse(storage?.getItem(key) ?? '') as State | null);
  return state?.v === 1 && state.calls && state.asks ? state : undefined;
}

export function save(kept: Kept): void {
  const { state, storage, key } = kept;
  const { calls, asks } = state;
  for (const some of [calls, asks]) for (const id of Object.keys(some).slice(0, -MOST)) delete some[id];
  if (kept.closed || kept.page.leaving) return;
  let cause: unknown;
  try {
    try {
      storage?.setItem(key, JSON.stringify(state));
    } catch (full) {
      storage?.setItem(key, JSON.stringify({ ...state, calls: withoutParams(calls) }));
      // Without a session, and without a handle, a call is found by sending it again.
      for (const { headers, task } of Object.values(calls)) if (headers && !task) cause = full;
    }
  } catch (failure) {
    // An old position would make the next page show events twice: rather nothing than that.
    remove(kept);
    cause = failure;
  }
  if (cause && !kept.broken) kept.report(new StorageFailed('storage is full', { cause }));
  kept.broken = cause;
}

/** Nothing of it may be found by the next page. */
export function clear(kept: Kept): void {
  const { tab, life } = kept.state;
  kept.state = { ...fresh(), tab, life };
  remove(kept);
}

/** Where it is forbidden, nothing was stored. */
const remove = ({ storage, key }: Kept): void => tried(() => storage?.removeItem(key));

/** Arguments of calls are the large part, and in a session only there to be shown. */
const withoutParams = (calls: State['calls']): object =>
  Object.fromEntries(Object.entries(calls).map(([id, { params: _, ...call }]) => [id, call]));
