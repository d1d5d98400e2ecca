/**
 * A table that says what a response, or a lost connection, means for what was sent. `src/perdure/_core/delivery.py` has
 * the same table with the reason for each row; `tests/vectors/delivery.json` tests both, cell by cell.
 */

import type { Id, Message } from './wire.js';

/** What to do next. */
export const enum Meaning {
  /** Read the answer from this response's event stream. */
  Follow = 'F',
  /** Finished: the body is the answer, or a message without an answer was accepted. */
  Answer = 'A',
  /** Send the same again after a pause: by POST a message that was not accepted, by GET a request with a position. */
  Again = 'G',
  /** Start over after a pause: a request under a new id, a stream without its position. */
  Restart = 'S',
  /** Begin another session, then look up `SESSION_REPLACED`. */
  Renew = 'N',
  /** Interrupted, outcome unknown. */
  Unknown = 'U',
  /** No server accepted it within the limits. */
  Unreachable = 'X',
  /** It cannot work, and was not accepted or did no harm. */
  Refused = 'R',
}

/** What was sent: five by POST, three by GET, then two by POST without a session. The columns of the table. */
export const enum Sent {
  Call,
  /** A call that may be repeated. */
  Read,
  Notification,
  Reply,
  Handshake,
  /** A call with a position. */
  CallResumed,
  ReadResumed,
  /** Of the standalone stream. */
  Listener,
  /** A tool's call without a session that may be sent again: it has a key, or its tool may run twice. */
  Keyed,
  /** The same, and it may have arrived. */
  KeyedAgain,
}

/** What came back, and what else is known of what was sent. */
export interface Seen {
  readonly status: number;
  readonly isStream: boolean;
  /** The message that its body is, if it is JSON. */
  readonly answer?: Partial<Message> | null | undefined;
  /** Of the request that was sent. */
  readonly id?: Id | undefined;
  /** It has a `Retry-After`. */
  readonly saysWhen?: boolean;
  /** 404 means that the session is gone. */
  readonly mayRenew?: unknown;
  readonly hasPosition?: unknown;
}

// A letter of `Meaning` for each column, in the order of `Sent`. A blank is a cell that there is not: those of GET in rows
// of POST alone, and the other way round.
const STREAM = 'FFAAFFFFFF';
const ANSWERED = 'AAAAA   AA';
const TAKEN = 'URAAR   SS';
const NOT_NOW = 'GGGGG   GG';
const SESSION_GONE = 'NNNNRNNN';
const SAID_NO = 'AARRA   AA';
/** 401 and 403: the user must act before there can be a handshake. */
const SAID_WHO = 'AARRR   AG';
const NO = 'RRRRR   RG';
const SAID_FAILED = 'AAGGA   AA';
const AWAY = 'USGGG   SS';
const FAILED = 'URGGR   SS';
const BAD_POSITION = '     USS';
const NO_STREAM = '       R';
const UNREADABLE = '     GGG';

// What is no response. A browser tells neither of the first two from a lost connection, sees events that are too large in
// `lines.ts`, and says that attempts are over with the last error; these rows are here to be compared with Python's.
export const NOT_SENT = 'GGGGGGGGGG';
export const UNTRUSTED = 'RRRRRGGGRG';
export const NO_CREDENTIALS = 'RRRRRGGGRG';
export const LOST = 'USGGGGGGSS';
export const TOO_LARGE = 'URAARURRUU';
export const SESSION_REPLACED = 'GGGRGUSS';
export const PATIENCE_ENDED = 'XXXXXUXXXU';

export const isStream = (status: number, media: string | null | undefined): boolean =>
  status === 200 && !!media?.toLowerCase().startsWith('text/event-stream');

/** The row of the table for a response. */
function rowOf(sent: Sent, seen: Seen): string {
  const { status, isStream, answer, id, saysWhen, mayRenew, hasPosition } = seen;
  const isError = answer?.error?.code != null;
  const isOwn = answer?.id === id;
  if (isStream) return STREAM;
  if (status === 404 && mayRenew && sent < Sent.Keyed) return SESSION_GONE;
  if (sent > Sent.Handshake && sent < Sent.Keyed) {
    if (![400, 404, 405].includes(status)) return UNREADABLE;
    return sent === Sent.Listener && (status > 400 || !hasPosition) ? NO_STREAM : BAD_POSITION;
  }
  if (status === 429 || (status === 503 && saysWhen)) return NOT_NOW;
  if (status < 300) return (isError ? isOwn || answer.id == null : isOwn && answer?.result) ? ANSWERED : TAKEN;
  if (status < 500) return !isError ? NO : status === 401 || status === 403 ? SAID_WHO : SAID_NO;
  if (isError && isOwn) return SAID_FAILED;
  return status > 501 && status < 505 ? AWAY : FAILED;
}

/** What a response means. */
export const ofResponse = (sent: Sent, seen: Seen): Meaning => rowOf(sent, seen)[sent] as Meaning;

/** What it means that there is none, or that it broke off. */
export const ofFailure = (sent: Sent, row: string): Meaning => row[sent] as Meaning;
