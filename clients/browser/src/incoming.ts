/** What the server sends, on its way to the client. */

import { answer, type Call, tell } from './calls.js';
import { guard, type Link, trace } from './link.js';
import type { Line } from './lines.js';
import type { Gap } from './options.js';
import type { ServerEvent } from './sse.js';
import { save } from './state.js';
import { tried } from './tried.js';
import { type Id, isRequest, isResponse, type Message } from './wire.js';

/** Events have come. What each of them changes is stored in the turn in which it is handed on. */
export async function deliver(link: Link, line: Line, events: ServerEvent[]): Promise<void> {
  let told = false;
  for (const event of events) {
    const m = messageIn(link, event);
    if (m && told && isResponse(m)) {
      // The SDK's client hands notifications on a moment later, and drops those that its answer overtakes.
      save(link);
      await nextTurn();
    }
    if (line.over || link.page.leaving) return; // the next page will read it
    if (event.id) moved(link, line, event.id);
    trace(link, 'event', line);
    if (m) route(link, m, line.call);
    told ||= !!m;
  }
  save(link);
}

/** What cannot be read is told and passed over: it would be the same another time. */
export const messageIn = (link: Link, { event, data }: ServerEvent): Message | undefined =>
  event === 'message' && data ? tried(() => JSON.parse(data) as Message, link.report) : undefined;

function moved(link: Link, line: Line, position: string): void {
  const { call } = line;
  line.position = position;
  if (call) {
    call.kept.position = position;
    guard(link, call.onposition, position);
  } else link.state.standalone = position;
}

/** `call`: whose stream it came on. */
export function route(link: Link, m: Message, call: Call | undefined): void {
  const { asks } = link.state;
  const { method, params, result } = m;
  if (isResponse(m)) {
    if (!call) return;
    const { kept } = call;
    if (kept.method === 'initialize' && result) shaken(link, kept.params ?? {}, result);
    return answer(link, call, m);
  }
  if (method === 'notifications/perdure/gap')
    return guard(link, link.options.ongap, { ...(params as unknown as Gap), call: call?.kept });
  if (method === 'notifications/progress') return progress(link, m);
  if (method === 'notifications/cancelled') delete asks[params?.['requestId'] as Id];
  if (isRequest(m)) asks[m.id] = m;
  else if (call) tell(link, call, m);
  guard(link, link.hand, m);
}

/** Its token tells whose it is, on whatever stream it comes. */
function progress(link: Link, m: Message): void {
  const call = link.running.get(String(m.params?.['progressToken']).replace(/^\d+:/, ''));
  const progressToken = call?.kept.token;
  if (progressToken === undefined) return; // no request waits for it
  const told = { ...m, params: { ...m.params, progressToken } };
  if (call?.recovered) tell(link, call, told);
  else guard(link, link.hand, told);
}

/** The handshake is done, and the next page will need it. */
export function shaken({ state }: Link, params: Record<string, unknown>, result: unknown): void {
  state.handshake = { params, result };
  state.version = (result as { protocolVersion: string }).protocolVersion;
}

/** Timers are slowed down in pages that are hidden; messages are not. */
export const nextTurn = (): Promise<void> =>
  new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => resolve(port1.close());
    port2.postMessage(0);
  });
