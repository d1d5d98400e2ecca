/** What a page tells the transport, and what it is told. */

import type { RecoveredCall } from './calls.js';
import type { KeyValue } from './state.js';

export type Status = 'connecting' | 'connected' | 'reconnecting' | 'disconnected';

/** What a call was asked for. */
export interface Asked {
  readonly method: string;
  readonly params?: unknown;
}

export interface Gap {
  /** The call that events are missing of; none for the standalone stream. */
  readonly call?: Asked | undefined;
  readonly from: number;
  readonly to: number;
  readonly reason: string;
}

/** What a page may want to show or to log. */
export interface Trace {
  /** `turn`: it has a connection again, which it had let go of to make room for others. */
  readonly what: 'event' | 'open' | 'turn' | 'broken';
  /** Nothing for the standalone stream. */
  readonly call?: Asked | undefined;
  readonly position?: string | undefined;
  readonly cause?: unknown;
}

export interface Options {
  /** Where the state is kept: `sessionStorage` unless told otherwise; `null` keeps nothing. */
  storage?: KeyValue | null;
  /** The name of the state in storage; needed where one page has several transports to one URL. */
  key?: string;
  /** A bearer token, asked for before each request. `renew` is true after the server has refused the last one. */
  token?: (ask: { renew: boolean }) => string | undefined | Promise<string | undefined>;
  headers?: Record<string, string>;
  /** Streams that are read at the same time; the others take turns. More than 4 is for servers behind HTTP/2. */
  streams?: number;
  /** Milliseconds without a byte, keep-alives included, after which a connection counts as dead. */
  silence?: number;
  onstatus?: (status: Status) => void;
  /** The call was running when the page before this one went. Set its `onnotification` here. */
  onrecovered?: (call: RecoveredCall) => void;
  /** The server says that events are gone. */
  ongap?: (gap: Gap) => void;
  /** The server no longer knows the session; a new one follows, and running calls end with `SessionLost`. */
  onlost?: (session: string) => void;
  ontrace?: (trace: Trace) => void;
}

export interface SendOptions {
  headers?: Readonly<Record<string, string>> | undefined;
  /** Go on with a call of which only the position is known; nothing is sent. */
  resumptionToken?: string | undefined;
  onresumptiontoken?: ((token: string) => void) | undefined;
}
