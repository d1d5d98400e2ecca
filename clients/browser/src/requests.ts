/**
 * Requests without a session (2026-07-28). Each is a POST of its own, and there is no way to read a broken response on:
 * what may be sent again is sent again, under a new id, for as long as its connection breaks (`delivery.ts`).
 */

import type { Call } from './calls.js';
import { Sent } from './delivery.js';
import { messageIn, nextTurn, route } from './incoming.js';
import { type Link, type Offers, trouble } from './link.js';
import { Line } from './lines.js';
import { post } from './sending.js';
import { decoder } from './sse.js';
import { CAPABILITIES, envelopeOf, type Id, isRequest, isResponse, message, type Message, type Request, VERSION, wireId } from './wire.js';

const TASKS = 'io.modelcontextprotocol/tasks';
const CALLS = 'dev.perdure/calls';

/** Milliseconds for which a server keeps the key of a call, where it does not say: Perdure's keep theirs for a day. */
const KEEPS = 3_600_000;

export interface Asking {
  headers?: Readonly<Record<string, string>> | undefined;
  /** Whose request it is. The end of the call ends it. */
  call?: Call | undefined;
  attempts?: number | undefined;
  /** A connection that has fallen silent is given up for another one. */
  isCut?: boolean;
  /** Is given the notifications that come before the answer. */
  take?: (m: Message) => void;
}

/** Take a request to its answer. Throws as `post` does. */
export async function ask(link: Link, { params, ...rest }: Request, sent: Sent, asking: Asking = {}): Promise<Message> {
  const m = { ...rest, params: { ...params, _meta: withTasks(params?.['_meta'] as Record<string, unknown>) } };
  const { headers, call, attempts, isCut, take = (told) => route(link, told, call) } = asking;
  const line = new Line(call, isCut ? '-' : undefined);
  if (call) call.line = line;
  link.lines.add(line);
  const read = (response: Response, id: Id) => answerOn(link, line, response, id, take);
  try {
    const [, answer] = await post(link, m, sent, { ...headers, ...headersOf(m) }, false, attempts, { line, read });
    return answer as Message;
  } finally {
    link.lines.delete(line);
    trouble(link, m);
  }
}

/** The answer to a request on its event stream; nothing if that ends before. */
async function answerOn(
  link: Link,
  line: Line,
  { body }: Response,
  id: Id,
  take: (m: Message) => void,
): Promise<Message | undefined> {
  const { signal } = line.abort;
  const events = decoder();
  const reader = body?.getReader();
  const stop = () => void reader?.cancel().catch(() => {});
  signal.addEventListener('abort', stop); // a body that is aborted need not say so in every engine
  let told = false;
  while (reader) {
    const { done, value } = await reader.read();
    if (done || signal.aborted) break;
    line.heard = Date.now();
    for (const event of events.feed(value)) {
      const m = messageIn(link, event);
      if (!m || line.over || link.page.leaving) continue;
      if (!isResponse(m)) {
        if (isRequest(m)) continue; // the revision has none
        take(m);
        told = true;
      } else if (m.id === id || m.id == null) {
        stop();
        if (told) await nextTurn();
        return m;
      }
    }
  }
  return undefined;
}

/** The headers by which gateways know a request. */
function headersOf({ method, params = {}, ...rest }: Request): Record<string, string> {
  const { [VERSION]: version } = envelopeOf({ ...rest, params });
  const headers: Record<string, string> = { 'mcp-protocol-version': String(version), 'mcp-method': method };
  const { name, uri, taskId } = params;
  const value = /^(tools\/call|prompts\/get)$/.test(method) ? name : method === 'resources/read' ? uri : /^tasks\//.test(method) && taskId;
  if (typeof value === 'string') headers['mcp-name'] = headerValue(value);
  return headers;
}

/** Visible ASCII goes as it is, all else in the revision's own form. */
export const headerValue = (text: string): string =>
  /^[!-~]([\t -~]*[!-~])?$/.test(text) && !/^=\?base64\?.*\?=$/.test(text)
    ? text
    : `=?base64?${btoa(String.fromCharCode(...new TextEncoder().encode(text)))}?=`;

/** How many requests of our own there were. */
let count = 0;

/** A request of our own that may be repeated. */
export function own(link: Link, method: string, params: object = {}, asking: Asking = {}): Promise<Message> {
  const envelope = link.envelope ?? envelopeOf(asking.call?.kept as Message);
  const m = message({ id: wireId(link.state.life, `own ${count++}`), method, params: { ...params, _meta: envelope } });
  return ask(link, m as Request, Sent.Read, { take: () => {}, ...asking });
}

/** `_meta` of a client that takes tasks, and sends again what breaks: it is this transport that does. */
export function withTasks(given: Record<string, unknown>): Record<string, unknown> {
  const capabilities = given[CAPABILITIES] as { extensions?: object } | undefined;
  return { ...given, [CAPABILITIES]: { ...capabilities, extensions: { ...capabilities?.extensions, [TASKS]: {}, [CALLS]: {} } } };
}

/** What the server offers, as it has said to the client; or to us, where the client knew it without asking. */
export function offers(link: Link): Promise<Offers> {
  link.offers ??= own(link, 'server/discover').then(({ result }) => offersIn(result));
  link.offers.catch(() => delete link.offers);
  return link.offers;
}

/** What a server says of itself in `server/discover`. */
export function offersIn(result: unknown): Offers {
  const { capabilities } = (result ?? {}) as { capabilities?: { extensions?: Record<string, { keptMs?: unknown } | undefined> } };
  const { [CALLS]: calls } = capabilities?.extensions ?? {};
  return { keeps: calls && (typeof calls.keptMs === 'number' ? calls.keptMs : KEEPS) };
}
