/** What the client sends, on its way to the server. */

import { wait } from './backoff.js';
import { type Call, forget, giveUp } from './calls.js';
import { OutcomeUnknown, type Refused } from './errors.js';
import { answerIn, isEventStream, request, type Sending, statusOf } from './http.js';
import { route } from './incoming.js';
import { type Link, trouble } from './link.js';
import { Line, listen } from './lines.js';
import type { SendOptions } from './options.js';
import { save } from './state.js';
import { isKept, isRepeatable, isRequest, type Message, outgoing, type Request, tokenOf } from './wire.js';

/** Attempts for what may be sent twice; together with the waits between them about a minute. */
export const ATTEMPTS = 7;

/** POST until there is an answer that counts. Only what may be sent twice gets attempts, or what was not taken. */
export async function post(link: Link, m: Message, attempts: number, sending?: Sending): Promise<Response> {
  for (let attempt = 0; ; attempt++) {
    await link.page.awake();
    if (link.closed) throw new Error('the transport is closed');
    try {
      const response = await request(link, 'POST', { ...sending, body: m });
      trouble(link, m);
      return response;
    } catch (error) {
      const { status, after } = error as Partial<Refused>;
      // The server, or what stands before it, has not taken the request, and says so.
      const isNotNow = status === 429 || (status === 503 && after !== undefined);
      const isUnknown = !status || (status >= 500 && !isNotNow);
      const last = attempt >= (isNotNow ? attempts || ATTEMPTS : isUnknown ? attempts : 0);
      trouble(link, m, !last && error);
      if (!last) await link.page.pause(after || wait(attempt));
      // Nobody answered, or only that it went wrong: it may have run, which does no harm if it is a read.
      else throw isUnknown && !(status && attempts) && isRequest(m) ? new OutcomeUnknown(m.method, m.params, (error as Error).message) : error;
    }
  }
}

/** POST to this session, or to the next: what was refused because the session is gone has not run. */
export async function send(link: Link, m: Message, attempts: number, sending?: Sending): Promise<Response> {
  const { session } = link.state;
  try {
    return await post(link, m, attempts, sending);
  } catch (error) {
    if (statusOf(error) !== 404 || !session || m.method === 'initialize') throw error;
    await link.lost(session);
    return post(link, m, attempts, sending);
  }
}

/** A notification, or an answer of the client's. Hearing it twice does no harm there. */
export const say = (link: Link, m: Message, headers?: Sending['headers']): Promise<Response> =>
  send(link, m, ATTEMPTS, { headers });

/** A request. `begun` looks at the response before it is read. */
export async function call(
  link: Link,
  m: Request,
  { headers, resumptionToken: position, onresumptiontoken: onposition }: Omit<SendOptions, 'headers'> & Sending,
  begun?: (response: Response) => void,
): Promise<void> {
  const { state, running } = link;
  const { method, params } = m;
  const wire = outgoing(state.life, m);
  const kept = { id: m.id, token: tokenOf(m), method, params, position };
  const it: Call = { id: wire.id, kept, onposition };
  running.set(it.id, it);
  if (isKept(method)) state.calls[it.id] = kept;
  save(link);
  const again = isRepeatable(method);
  const go = async () => {
    const response = await send(link, wire, again ? ATTEMPTS : 0, { headers });
    begun?.(response);
    if (isEventStream(response)) void listen(link, new Line(it), response);
    else void takeJson(link, it, response);
  };
  if (again) it.again = go;
  try {
    if (position) void listen(link, new Line(it, position));
    else await go();
  } catch (error) {
    forget(link, it);
    save(link);
    throw error;
  }
}

async function takeJson(link: Link, it: Call, response: Response): Promise<void> {
  try {
    const m = await answerIn(response);
    if (!link.page.leaving) route(link, m, it);
  } catch (error) {
    if (!link.page.leaving) giveUp(link, it, String(error));
  }
  save(link);
}
