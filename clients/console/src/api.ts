// The console's API: its objects, and requests with named errors.

export interface StoreFacts {
  store: string;
  version: string;
  allow_end: boolean;
  now: number;
  degraded: boolean | null;
  size_bytes: number | null;
  events: number | null;
  oldest: number | null;
  /** `calls` are tasks and other durable calls. */
  counts: { sessions: number; calls: number; running: number };
  problems: string[];
}

export interface NodeFacts {
  id: string;
  alive: boolean;
  /** alive, dead (its calls are to be settled), left (in good order), gone (its calls are settled) */
  state: string;
  since: number | null;
  degraded: boolean | null;
  streams: number | null;
  calls: number | null;
  readers: number | null;
}

export interface DurableCall {
  method: string;
  name: string | null;
  state: string;
  attempt: number;
  node: string | null;
}

export interface Listed {
  kind: string;
  id: string;
  owner: string;
  owner_name: string | null;
  state: string;
  version: string;
  created: number;
  active: number;
  calls: number;
  streams: number;
  home: string | null;
  call: DurableCall | null;
}

export interface SessionPage {
  now: number;
  items: Listed[];
  /** Where the next page begins. */
  next: number | null;
  total: number;
  /** There are more than the console lists. */
  left_out: boolean;
}

/** A step of a call's tool; its value is not shown. */
export interface ToolStep {
  name: string;
  kind: string;
  state: string;
  /** The run in which it ended, or began. */
  attempt: number;
  began: number;
  /** Of a sleep, the time at which it ends. */
  ended: number | null;
}

export interface CallRow extends DurableCall {
  request_id: number | string;
  progress: number | null;
  stream: string;
  /** Questions of its tool that its client has not answered. */
  asks: number;
  steps: ToolStep[];
}

export interface StreamRow {
  id: string;
  kind: string;
  last: number;
  sealed: boolean;
  generation: number;
  generations: { generation: number; end: number }[];
  opened: number;
  node: string | null;
  /** The reader, if it is at another node than the writer. */
  reader: { node: string; seq: number } | null;
  /** The last event that readers have got, as far as it was written. */
  delivered: number;
  /** The reader was lost before the end, and no other reader has come to the end since. */
  unread: boolean;
}

export interface Ask {
  id: string;
  stream: string;
  node: string | null;
  request: unknown;
}

export interface Session extends Omit<Listed, 'calls' | 'streams'> {
  now?: number;
  ended: string | null;
  incarnation: number;
  initialized: boolean;
  client: Record<string, unknown>;
  server: Record<string, unknown>;
  resume_token: boolean;
  sticky: unknown[];
  calls: CallRow[];
  asks: Ask[];
  streams: StreamRow[];
  /** Streams that are not among these, because there are too many. */
  left_out: number;
}

export interface LogEvent {
  what: 'event';
  stream: string;
  seq: number;
  time: number;
  final: boolean;
  message: unknown;
  bytes?: number;
  cut?: boolean;
}

export interface LogGap {
  what: 'gap';
  stream: string;
  first: number;
  last: number;
}

export interface LogOpened {
  what: 'opened';
  stream: string;
  kind: string;
  time: number;
  calls: { request_id: number | string; method: string; name: string | null }[];
}

export interface Tick {
  what: 'tick';
  time: number;
  events: number;
  calls_begun: number;
  calls_ended: number;
  running: number;
  sessions: number;
  degraded: boolean | null;
  latency: { of?: string; p50: number; p99: number } | null;
}

export type Seen =
  | LogEvent
  | LogGap
  | LogOpened
  | Tick
  | { what: 'state'; session: Session }
  | { what: 'ended'; session: string; reason: string }
  | { what: 'changed' }
  | { what: 'lost'; error: string };

/** The console answered with an error; `status` is 0 if it did not answer. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** The name of the key in the browser's storage, which only pages of this scheme, host and port can read, unlike a cookie. */
const KEY = 'perdure-console-key';

/** Send a request with the key of this page; returns an answer without an error. */
export async function ask(path: string, init: RequestInit, bearer = localStorage.getItem(KEY)): Promise<Response> {
  const headers: Record<string, string> = bearer ? { authorization: `Bearer ${bearer}` } : {};
  let response: Response;
  try {
    response = await fetch(path, { credentials: 'omit', cache: 'no-store', headers, ...init });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new Refused(0, 'The console does not answer.');
  }
  if (response.ok) return response;
  const said = ((await response.json().catch(() => null)) as { error?: unknown } | null)?.error;
  throw new Refused(response.status, typeof said === 'string' ? said : `The console answered with status ${response.status}.`);
}

async function request(path: string, init: RequestInit): Promise<unknown> {
  const response = await ask(path, init);
  return response.json().catch(() => {
    throw new Refused(0, 'The console does not answer.');
  });
}

/** Exchange a token for the key of this page. */
export async function enter(token: string): Promise<void> {
  const { key } = (await (await ask('/api/enter', { method: 'POST' }, token)).json()) as { key: string };
  localStorage.setItem(KEY, key);
}

const within = (id: string): string => `/api/sessions/${encodeURIComponent(id)}`;

export const api = {
  store: (signal?: AbortSignal) => request('/api/store', signal ? { signal } : {}) as Promise<StoreFacts>,
  nodes: (signal: AbortSignal) => request('/api/nodes', { signal }) as Promise<{ now: number; nodes: NodeFacts[] }>,
  sessions: (query: URLSearchParams, signal: AbortSignal) =>
    request(`/api/sessions?${query}`, { signal }) as Promise<SessionPage>,
  session: (id: string, signal: AbortSignal) => request(within(id), { signal }) as Promise<Session>,
  events: (id: string, stream: string, after: number, limit: number, signal: AbortSignal) =>
    request(`${within(id)}/events?${new URLSearchParams({ stream, after: `${after}`, limit: `${limit}` })}`, { signal }) as Promise<{
      items: (LogEvent | LogGap)[];
      next: unknown;
    }>,
  event: (id: string, stream: string, seq: number) =>
    request(`${within(id)}/events/${encodeURIComponent(stream)}/${seq}`, {}) as Promise<LogEvent>,
  end: (id: string) => request(`${within(id)}/end`, { method: 'POST' }) as Promise<{ said: string }>,
  live: '/api/live',
  liveOf: (id: string): string => `${within(id)}/live`,
};
