/** What the server sends, on its way to the client. */

import { answer, type Call, tell } from './calls.js';
import { asked, guard, type Link, trace } from './link.js';
import type { Line } from './lines.js';
import type { ServerEvent } from './sse.js';
import { save } from './state.js';
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
function messageIn(link: Link, { event, data }: ServerEvent): Message | undefined {
  try {
    return event === 'message' && data ? (JSON.parse(data) as Message) : undefined;
  } catch (error) {
    link.report(error);
    return undefined;
  }
}

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
  const { asks, handshake } = link.state;
  if (isResponse(m)) {
    if (call?.kept.method === 'initialize' && m.result) shaken(link, handshake?.params, m.result);
    if (call) answer(link, call, m);
    return;
  }
  const { method, params } = m;
  if (method === 'notifications/perdure/gap') return gap(link, params, call);
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
  if (progressToken === undefined) return; // nobody waits for it
  const told = { ...m, params: { ...m.params, progressToken } };
  if (call?.recovered) tell(link, call, told);
  else guard(link, link.hand, told);
}

function gap(link: Link, params: Message['params'], call: Call | undefined): void {
  const { from, to, reason } = params as { from: number; to: number; reason: string };
  guard(link, link.options.ongap, { from, to, reason, call: asked(call) });
}

/** The handshake is done, and the next page will need it. */
export function shaken({ state }: Link, params: unknown, result: unknown): void {
  state.handshake = { params, result };
  state.version = (result as { protocolVersion: string }).protocolVersion;
}

/** Timers are slowed down in pages that nobody sees; messages are not. */
function nextTurn(): Promise<unknown> {
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = resolve;
    port2.postMessage(0);
  }).finally(() => port1.close());
}
