/** Requests as Streamable HTTP wants them, and what can be read from the answers. */

import { isStream } from './delivery.js';
import { Refused, Unauthorized } from './errors.js';
import type { Link } from './link.js';
import { isModern, type Message } from './wire.js';

export interface Sending {
  body?: Message;
  /** Headers of this request only; those without a value are left out. */
  headers?: Record<string, string | undefined> | undefined;
  signal?: AbortSignal | undefined;
}

/** A response, and what it is as an error unless it is an event stream, which is still to be read. */
export type Heard = readonly [response: Response, error?: Refused];

/**
 * Send it, with the session's headers and a token, and once more with another token if that one is refused. Throws where
 * there is no response, or no token.
 */
export async function request(link: Link, method: string, sending: Sending = {}, renew = false): Promise<Heard> {
  const { body, signal = null, headers } = sending;
  const { options, page } = link;
  try {
    const { session, version } = body && (body.method === 'initialize' || isModern(body)) ? {} : link.state;
    const bearer = await bearerOf(link, renew);
    const all = new Headers(options.headers);
    const set = {
      ...headers,
      accept: 'application/json, text/event-stream',
      'content-type': body && 'application/json',
      'mcp-session-id': session,
      'mcp-protocol-version': version ?? headers?.['mcp-protocol-version'],
      authorization: bearer && `Bearer ${bearer}`,
    };
    for (const [name, value] of Object.entries(set)) if (value) all.set(name, value);
    // Without a message this is `undefined`, whatever its type says.
    const text = JSON.stringify(body);
    const response = await fetch(link.url, { method, headers: all, body: text, signal, cache: 'no-store' });
    const { status } = response;
    if (isStream(status, response.headers.get('content-type'))) return [response];
    const isUnknown = status === 401;
    if (isUnknown && options.token && !renew) return request(link, method, sending, true);
    const said = response.headers.get('retry-after');
    // A date is not a number, and no server sends one.
    const after = said ? Math.max(0, 1000 * Number(said)) : undefined;
    return [response, new (isUnknown ? Unauthorized : Refused)(status, await response.text(), after)];
  } catch (error) {
    // A page that goes loses its connections; nothing follows from that, unless it comes back.
    if (page.leaving) await page.awake();
    throw error;
  }
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
