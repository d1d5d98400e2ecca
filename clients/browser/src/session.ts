/**
 * How a session begins, goes on and is replaced.
 *
 * After a reload there are two ways back. Where no call was running, the client's own handshake goes to the server with
 * the old session's id, and the server answers as it did the first time (reattach). Where calls are running, the
 * handshake is answered from storage, once the server has shown that it still knows the session: a reattach would begin
 * a new incarnation, in which those calls could no longer be cancelled, and would send what they say meanwhile to
 * another stream.
 */

import { type Call, giveUp, RecoveredCall, settle, unknown } from './calls.js';
import { Sent } from './delivery.js';
import { SessionLost } from './errors.js';
import { statusOf } from './http.js';
import { guard, type Link, setStatus } from './link.js';
import { Line, listen } from './lines.js';
import type { SendOptions } from './options.js';
import { call, post, say } from './sending.js';
import { drop, end, goOn } from './modern.js';
import { clear, type KeptCall, save } from './state.js';
import { isKept, type Message, message, type Request, wireId } from './wire.js';

/** The client begins. */
export async function handshake(link: Link, m: Request, options: SendOptions): Promise<void> {
  const { session, handshake: before } = link.state;
  if (session && link.recovered.size) {
    if (before?.result && traits(before.params) === traits(m.params ?? {}) && (await isKnown(link))) {
      link.resumed = true;
      return guard(link, link.hand, message({ id: m.id, result: before.result }));
    }
    abandon(link, session);
  }
  link.state.asks = {}; // they are asked again
  const headers = { ...options.headers, 'x-mcp-reconnect-session': link.state.session };
  await call(link, m, { ...options, headers }, (response) => opened(link, response));
}

/** What makes a client, as the server sees it: another version or other capabilities are another client. */
const traits = ({ protocolVersion, capabilities }: Record<string, unknown>): string =>
  JSON.stringify([protocolVersion, capabilities]);

/** Whether the server still knows the session. It waits for a server that is away. */
async function isKnown(link: Link): Promise<boolean> {
  const ping = message({ id: wireId(link.state.life, 'ping'), method: 'ping' });
  try {
    const [, answer] = await post(link, ping, Sent.Read, undefined, false, Infinity);
    return !answer?.error;
  } catch (error) {
    if (statusOf(error) === 404) return false;
    throw error;
  }
}

/** The answer to `initialize` tells which session it is. */
function opened(link: Link, { headers }: Response): void {
  const session = headers.get('mcp-session-id');
  const { session: before, handshake: whole } = link.state;
  if (before && before !== session && whole) abandon(link, before);
  if (session) link.state.session = session;
}

/** The client has its handshake. */
export async function initialized(link: Link, m: Message): Promise<void> {
  if (!link.resumed) await say(link, m);
  link.ready = true;
  setStatus(link);
  setTimeout(() => void begin(link));
}

/** Everything is in place: go on where the page before has left. */
export async function begin(link: Link): Promise<void> {
  const { state, options, recovered } = link;
  if (!link.modern) for (const ask of Object.values(state.asks)) guard(link, link.hand, ask);
  if (options.onrecovered) for (const it of recovered) guard(link, options.onrecovered, it.recovered as RecoveredCall);
  const opened = options.onrecovered || link.taken ? readRecovered(link) : [];
  if (link.modern) {
    // What fails here is tried again by the next page.
    for (const [id, kept] of Object.entries(state.calls)) if (kept.cancelled) end(link, { id, kept }).catch(() => {});
    return;
  }
  // A GET without a position says that the client is back without its calls, and what they say would follow it there.
  if (!state.standalone) await Promise.all(opened);
  if (state === link.state) listenStandalone(link); // else there is another session, which has its own
}

function listenStandalone(link: Link): void {
  const { session, standalone } = link.state;
  if (session && !link.closed) void listen(link, new Line(undefined, standalone));
}

/** The calls that are stored, for a page that may want them. */
export function recover(link: Link): void {
  for (const [id, kept] of Object.entries(link.state.calls)) {
    const recovered = new RecoveredCall(kept, async (reason) => {
      if (kept.headers) await drop(link, it);
      else await say(link, message({ method: 'notifications/cancelled', params: { requestId: id, reason } }));
    });
    const it: Call = { id, kept, recovered, answered: new Set() };
    if (kept.cancelled) continue;
    link.running.set(id, it);
    link.recovered.add(it);
  }
}

/** Somebody has taken them. Gives promises of their streams. */
export function readRecovered(link: Link): Promise<void>[] {
  const opened: Promise<void>[] = [];
  if (!link.ready || link.closed) return opened;
  for (const it of link.recovered) {
    const { position } = it.kept;
    if (it.recovered?.settled) link.recovered.delete(it);
    else if (it.kept.headers) void goOn(link, it);
    else if (!position) settle(link, it, unknown(it.kept, 'the page went'));
    else if (!it.line) opened.push(listen(link, new Line(it, position)));
  }
  save(link);
  return opened;
}

/** The server does not know the session any more; one handshake makes another, for all who find out. */
export async function lost(link: Link, session: string): Promise<void> {
  if (link.modern) return leave(link);
  if (session === link.state.session) link.renewing ??= renew(link, session).finally(() => delete link.renewing);
  await link.renewing;
}

/** There is a session's call of an earlier page, and the client has no use for another session. */
function leave(link: Link): void {
  delete link.state.session;
  for (const it of [...link.running.values()])
    if (it.recovered && !it.kept.headers) settle(link, it, unknown(it.kept, 'the session is gone', SessionLost));
  save(link);
}

/** With what the client said the first time. */
async function renew(link: Link, session: string): Promise<void> {
  const { params = {} } = link.state.handshake ?? {};
  link.ready = false;
  setStatus(link);
  abandon(link, session);
  for (const line of link.lines) line.end();
  const m = message({ id: 'renew', method: 'initialize', params }) as Request;
  const renewal = new RecoveredCall(m as KeptCall, async () => {});
  try {
    await call(link, m, {}, (response) => opened(link, response), renewal);
    await renewal.result;
    save(link);
    await post(link, message({ method: 'notifications/initialized' }), Sent.Notification, undefined, false);
    link.ready = true;
    setStatus(link);
    listenStandalone(link);
  } catch (error) {
    link.report(error);
    link.close();
    throw error;
  }
}

/** Nobody will ever know what became of the calls that run there. */
function abandon(link: Link, session: string): void {
  const running = [...link.running.values()];
  clear(link);
  guard(link, link.options.onlost, session);
  for (const it of running) {
    const again = () => giveUp(link, it, 'the session is gone');
    if (it.again && it.line) void Promise.resolve().then(() => link.renewing).then(again, again);
    else if (it.recovered || it.line) settle(link, it, unknown(it.kept, 'the session is gone', SessionLost));
    else if (isKept(it.kept.method)) link.state.calls[it.id] = it.kept; // on its way, and not accepted there
  }
}
