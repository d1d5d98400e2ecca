/** Requests as Streamable HTTP wants them, and what can be read from the answers. */

import { Refused, Unauthorized } from './errors.js';
import type { Link } from './link.js';
import { decoder } from './sse.js';
import { isResponse, type Message } from './wire.js';

export interface Sending {
  body?: Message;
  /** Headers of this request only; those without a value are left out. */
  headers?: Record<string, string | undefined> | undefined;
  signal?: AbortSignal;
}

/** Send it. Only success comes back: another status is thrown as `Refused`. */
export async function request(link: Link, method: string, sending: Sending = {}): Promise<Response> {
  try {
    return await attempt(link, method, sending, false);
  } catch (error) {
    // A page that goes loses its connections; nothing follows from that, unless it comes back.
    if (link.page.leaving) await link.page.awake();
    throw error;
  }
}

/** With the session's headers and a token, and once more with another token if that one is refused. */
async function attempt(link: Link, method: string, sending: Sending, renew: boolean): Promise<Response> {
  const { body, signal = null } = sending;
  const headers = await headersOf(link, sending, renew);
  // Without a message this is `undefined`, whatever its type says.
  const text = JSON.stringify(body);
  const response = await fetch(link.url, { method, headers, body: text, signal, cache: 'no-store' });
  const { ok, status } = response;
  if (ok) return response;
  const isUnknown = status === 401;
  if (isUnknown && link.options.token && !renew) return attempt(link, method, sending, true);
  const said = response.headers.get('retry-after');
  // A date, which nobody sends, is not a number.
  const after = said ? Math.max(0, 1000 * Number(said)) : undefined;
  throw new (isUnknown ? Unauthorized : Refused)(status, await response.text().catch(() => ''), after);
}

async function headersOf(link: Link, sending: Sending, renew: boolean): Promise<Headers> {
  const { body, headers } = sending;
  const { session, version } = body?.method === 'initialize' ? {} : link.state;
  const bearer = await bearerOf(link, renew);
  const all = new Headers(link.options.headers);
  const set = {
    ...headers,
    accept: 'application/json, text/event-stream',
    'content-type': body && 'application/json',
    'mcp-session-id': session,
    'mcp-protocol-version': version,
    authorization: bearer && `Bearer ${bearer}`,
  };
  for (const [name, value] of Object.entries(set)) if (value) all.set(name, value);
  return all;
}

/** A token that cannot be had is no lost connection: nothing was sent. */
async function bearerOf({ options }: Link, renew: boolean): Promise<string | undefined> {
  try {
    return await options.token?.({ renew });
  } catch (error) {
    throw new Unauthorized(401, `no token: ${error}`);
  }
}

export const statusOf = (error: unknown): number | undefined => (error as Partial<Refused>).status;

export const isEventStream = ({ headers }: Response): boolean =>
  !!headers.get('content-type')?.startsWith('text/event-stream');

/** The answer in a response that carries nothing else of interest. */
export async function answerIn(response: Response): Promise<Message> {
  const messages: Message[] = isEventStream(response)
    ? decoder()
        .feed(new Uint8Array(await response.arrayBuffer()))
        .flatMap(({ data }) => (data ? JSON.parse(data) : []))
    : [await response.json()];
  const found = messages.find(isResponse);
  if (!found) throw new Error('no answer');
  return found;
}
