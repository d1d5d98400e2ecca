/** Requests as Streamable HTTP wants them, and what can be read from the answers. */

import { Unauthorized } from './errors.js';
import type { Options } from './options.js';
import { Decoder } from './sse.js';
import type { State } from './state.js';
import { isResponse, type Message } from './wire.js';

export interface Sending {
  body?: Message | undefined;
  /** Headers of this request only. */
  headers?: unknown;
  /** The session to go on with, for `initialize`. */
  reconnect?: string | undefined;
  position?: string | undefined;
  signal?: AbortSignal | null;
}

/** Send it with the session's headers and a token, and once more with another token if that one is refused. */
export async function request(
  method: string,
  url: string,
  { token, headers: always }: Options,
  { session, version }: State,
  sending: Sending = {},
  renew = false,
): Promise<Response> {
  const { body, headers, reconnect, position, signal = null } = sending;
  const begins = body?.method === 'initialize';
  const bearer = await token?.({ renew });
  const all = new Headers(always);
  const set = (values: object) => {
    for (const [name, value] of Object.entries(values)) if (value) all.set(name, value as string);
  };
  set((headers as object | undefined) ?? {});
  set({
    accept: (body ? 'application/json, ' : '') + 'text/event-stream',
    'content-type': body && 'application/json',
    'mcp-session-id': !begins && session,
    'mcp-protocol-version': !begins && version,
    'x-mcp-reconnect-session': reconnect,
    'last-event-id': position,
    authorization: bearer && `Bearer ${bearer}`,
  });
  const init = { method, headers: all, body: body ? JSON.stringify(body) : null, signal, cache: 'no-store' } as const;
  const response = await fetch(url, init);
  if (response.status !== 401) return response;
  if (token && !renew) return request(method, url, { token, ...(always && { headers: always }) }, { session, version } as State, sending, true);
  throw new Unauthorized(401, await textOf(response));
}

/** The server has not taken it, and says so. */
export const isNotNow = ({ status }: Response): boolean => status === 503 || status === 429;

export function retryAfter({ headers }: Response): number | undefined {
  const seconds = parseFloat(headers.get('retry-after') ?? '');
  return seconds >= 0 ? seconds * 1000 : undefined;
}

export const textOf = (response: Response): Promise<string> => response.text().catch(() => '');

export const isEventStream = ({ headers }: Response): boolean =>
  !!headers.get('content-type')?.startsWith('text/event-stream');

/** The answer in a response that carries nothing else of interest. */
export async function answerIn(response: Response): Promise<Message> {
  const bytes = new Uint8Array(await response.arrayBuffer());
  const texts = isEventStream(response)
    ? new Decoder().feed(bytes).map(({ data }) => data)
    : [new TextDecoder().decode(bytes)];
  const messages = texts.filter(Boolean).map((text) => JSON.parse(text) as Message);
  return messages.find(isResponse) ?? { jsonrpc: '2.0' };
}
