/** What the client sends, on its way to the server. */

import { wait } from './backoff.js';
import { type Call, forget, type RecoveredCall, unknown } from './calls.js';
import { LOST, Meaning, NO_CREDENTIALS, ofFailure, ofResponse, Sent, SESSION_REPLACED, TOO_LARGE } from './delivery.js';
import type { Refused } from './errors.js';
import { request, type Sending, statusOf } from './http.js';
import { route } from './incoming.js';
import { type Link, trouble } from './link.js';
import { Line, listen } from './lines.js';
import type { SendOptions } from './options.js';
import { save } from './state.js';
import { tried } from './tried.js';
import { type Id, isKept, isRepeatable, type Message, outgoing, type Request, tokenOf } from './wire.js';

/** Attempts for what the server has not taken, or may take twice; together with the waits between them about a minute. */
const ATTEMPTS = 7;

/** An event stream that is still to be read, or a response that settles it, and the message that it is. */
export type Posted = readonly [response: Response, answer?: Message | undefined];

/** How a request without a session is read to its answer, on the connection of `line`. Gives nothing if that breaks. */
export interface Answering {
  readonly line: Line;
  read(response: Response, id: Id): Promise<Message | undefined>;
}

/** POST until the table (`delivery.ts`) says what came of it, in this session or, unless told otherwise, in the next. */
export async function post(
  link: Link,
  m: Message,
  sent: Sent,
  headers?: Sending['headers'],
  mayRenew = true,
  attempts = ATTEMPTS,
  answering?: Answering,
): Promise<Posted> {
  const { line, read } = answering ?? {};
  let { id } = m;
  for (let attempt = 0; ; attempt++) {
    await link.page.awake();
    if (link.closed || line?.over) throw new Error(link.closed ? 'the transport is closed' : 'the client gave it up');
    const { session } = link.state;
    if (line) {
      line.abort = new AbortController();
      line.heard = Date.now();
    }
    let meaning: Meaning;
    let failure: Partial<Refused> | undefined;
    try {
      const [response, error] = await request(link, 'POST', { headers, body: id ? { ...m, id } : m, signal: line?.abort.signal });
      const { status } = response;
      let answer = error && tried(() => JSON.parse(error.body) as Message);
      const saysWhen = error?.after !== undefined;
      meaning = ofResponse(sent, { status, isStream: !error, answer, id, saysWhen, mayRenew: mayRenew && session });
      if (meaning === Meaning.Follow || meaning === Meaning.Answer) {
        trouble(link, m);
        if (error || !read) return [response, answer];
        if (attempts === Infinity) attempt = 0; // the server was there
        answer = await read(response, id as Id);
        if (answer) return [response, answer];
        meaning = ofFailure(sent, LOST);
      }
      failure = error ?? new Error('the connection was lost');
    } catch (caught) {
      failure = caught as Error;
      meaning = ofFailure(sent, statusOf(caught) ? NO_CREDENTIALS : caught instanceof RangeError ? TOO_LARGE : LOST);
    }
    if (meaning === Meaning.Renew) {
      mayRenew = false;
      await link.lost(session as string);
      meaning = ofFailure(sent, SESSION_REPLACED);
    }
    const last = (meaning !== Meaning.Again && meaning !== Meaning.Restart) || attempt >= attempts;
    trouble(link, m, !last && failure);
    if (last) throw meaning === Meaning.Unknown ? unknown(m as Request, String(failure)) : failure;
    // The server may still have the first one.
    if (meaning === Meaning.Restart) {
      id += '.';
      if (sent === Sent.Keyed) sent = Sent.KeyedAgain;
    }
    await link.page.pause(failure?.after || wait(attempt));
  }
}

/** A notification, or an answer of the client's. Hearing it twice does no harm there. */
export const say = (link: Link, m: Message, headers?: Sending['headers']): Promise<Posted> =>
  post(link, m, m.method ? Sent.Notification : Sent.Reply, headers);

/** A request. `begun` looks at the response before it is read; `recovered` takes the answer in place of the client. */
export async function call(
  link: Link,
  m: Request,
  { headers, resumptionToken: position, onresumptiontoken: onposition }: Omit<SendOptions, 'headers'> & Sending,
  begun?: (response: Response) => void,
  recovered?: RecoveredCall,
): Promise<void> {
  const { state, running } = link;
  const { method, params } = m;
  const wire = outgoing(state.life, m);
  const kept = { id: m.id, token: tokenOf(m), method, params, position };
  const it: Call = { id: wire.id, kept, onposition, recovered };
  running.set(it.id, it);
  if (isKept(method)) state.calls[it.id] = kept;
  save(link);
  const sent = method === 'initialize' ? Sent.Handshake : isRepeatable(method) ? Sent.Read : Sent.Call;
  const go = async () => {
    const [response, answer] = await post(link, wire, sent, headers);
    begun?.(response);
    if (!answer) void listen(link, new Line(it), response);
    else if (!link.page.leaving) {
      route(link, { ...answer, id: it.id }, it);
      save(link);
    }
  };
  if (sent) it.again = go;
  try {
    if (position) void listen(link, new Line(it, position));
    else await go();
  } catch (error) {
    forget(link, it);
    save(link);
    throw error;
  }
}
