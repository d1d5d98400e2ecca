/** What the parts of one transport share, and how the page is told of it. */

import type { Call } from './calls.js';
import type { Line } from './lines.js';
import type { Release } from './lock.js';
import type { Options, Status, Trace } from './options.js';
import type { Page } from './page.js';
import type { Slots } from './slots.js';
import type { Kept } from './state.js';
import { tried } from './tried.js';
import type { Message } from './wire.js';

/** Extensions of a server: whether it has tasks, and for how many milliseconds it keeps the key of a call, if it does. */
export interface Offers {
  readonly keeps?: number | undefined;
}

export interface Link extends Kept {
  readonly url: string;
  readonly options: Options;
  readonly page: Page;
  readonly slots: Slots;
  /** Requests without an answer, of this page and of those before it, by their ids on the wire. */
  readonly running: Map<string, Call>;
  /** Calls of the pages before that this page has not seen the end of. */
  readonly recovered: Set<Call>;
  readonly lines: Set<Line>;
  /** How often a line has got through again after it could not. */
  returns: number;
  /** Who cannot get through to the server. */
  readonly troubled: Set<unknown>;
  status?: Status;
  /** The handshake is done. */
  ready?: boolean;
  release?: Release | undefined;
  renewing?: Promise<void> | undefined;
  /** The session goes on as it is, without a handshake that the server would see. */
  resumed?: boolean;
  /** There are no sessions: the client and the server speak 2026-07-28. */
  modern?: boolean;
  /** What the client says of itself with every request there. */
  envelope?: Record<string, unknown>;
  /** What the server has announced there. */
  offers?: Promise<Offers> | undefined;
  /** The page has asked for the calls of the pages before. */
  taken?: boolean;
  /** Give it to the client. */
  hand(m: Message): void;
  /** The server does not know this session; gives the promise of another. */
  lost(session: string): Promise<void>;
  close(): void;
}

/** A page's callback that throws disturbs only the page. */
export const guard = <T>(link: Link, callback: ((value: T) => void) | undefined, value: T): void =>
  tried(() => callback?.(value), link.report);

export function setStatus(link: Link): void {
  const { closed, troubled, ready, options } = link;
  const status = closed ? 'disconnected' : troubled.size ? 'reconnecting' : ready ? 'connected' : 'connecting';
  if (status === link.status) return;
  link.status = status;
  guard(link, options.onstatus, status);
}

/** Somebody cannot get through, or (without a cause) can again. */
export function trouble(link: Link, who: unknown, cause?: unknown): void {
  if (link.page.leaving) return;
  if (cause) link.troubled.add(who);
  else link.troubled.delete(who);
  setStatus(link);
}

export function trace(link: Link, what: Trace['what'], { call, position }: Line, cause?: unknown): void {
  guard(link, link.options.ontrace, { what, cause, call: call?.kept, position });
}
