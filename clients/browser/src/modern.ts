/**
 * What the client sends in the revision without sessions (2026-07-28). A tool's call has a key, where the server knows
 * keys, and may become a task there: both are stored before anything is waited for, so that the next page finds the
 * call by its key or its handle. The client sees an ordinary call.
 */

import { wait } from './backoff.js';
import { answer, type Call, forget, type RecoveredCall, settle, unknown } from './calls.js';
import { Sent } from './delivery.js';
import { OutcomeUnknown } from './errors.js';
import { ask, offers, offersIn, own } from './requests.js';
import { statusOf } from './http.js';
import { route } from './incoming.js';
import { guard, type Link } from './link.js';
import { listenTo } from './listening.js';
import type { SendOptions } from './options.js';
import { save } from './state.js';
import { follow, type InputRequired, isRound, stateOf } from './tasks.js';
import { envelopeOf, type Id, isRepeatable, isRequest, message, type Message, outgoing, type Request, tokenOf, wireId } from './wire.js';

const KEY = 'dev.perdure/key';
const CANCEL = 'dev.perdure/cancel';

/** JSON-RPC's code for a method that the server does not have. */
const METHOD_NOT_FOUND = -32601;

/** Runs of one tool that says that it may run twice, and whose call has no key: each lost connection is another run. */
const MOST_RUNS = 5;

/** Pages of `tools/list` that are read to find out what a tool says of itself. */
const TOOL_PAGES = 100;

/** The client sends something. */
export async function sendModern(link: Link, m: Message, options: SendOptions): Promise<void> {
  link.envelope = envelopeOf(m);
  if (!isRequest(m)) {
    // The revision has nothing else that a client says.
    if (m.method === 'notifications/cancelled') await cancelled(link, m.params?.['requestId'] as Id);
    return;
  }
  const { method, id } = m;
  const it = gone(link, m) ?? begun(link, m, options);
  try {
    if (method === 'tools/call') finish(link, it, await call(link, it, m));
    else if (method === 'subscriptions/listen') finish(link, it, await listenTo(link, it, m));
    else finish(link, it, await read(link, it, m, options));
  } catch (error) {
    forget(link, it);
    save(link);
    const status = statusOf(error) ?? 0;
    if (method !== 'server/discover' || status < 400 || status > 499 || status === 401 || status === 403) throw error;
    // A server of the other revisions need not say so in JSON; the client begins a session then.
    guard(link, link.hand, message({ id, error: { code: METHOD_NOT_FOUND, message: String(error) } }));
  }
}

function begun(link: Link, m: Request, { headers }: SendOptions): Call {
  const { id, method, params } = m;
  const kept = { id, token: tokenOf(m), method, params, headers: { ...headers } };
  const it: Call = { id: wireId(link.state.life, id), kept, answered: new Set() };
  link.running.set(it.id, it);
  return it;
}

/** The call that waits for the answers in this request, if its task has asked for them. */
function gone({ running }: Link, m: Request): Call | undefined {
  const state = m.params?.['requestState'];
  for (const it of running.values()) {
    if (!state || state !== stateOf(it)) continue;
    it.kept.id = m.id;
    it.kept.token = tokenOf(m);
    return it;
  }
  return undefined;
}

async function read(link: Link, it: Call, m: Request, { headers }: SendOptions): Promise<Message> {
  const { method } = m;
  const isDiscovery = method === 'server/discover';
  const sent = isDiscovery || isRepeatable(method) ? Sent.Read : Sent.Call;
  const found = await ask(link, outgoing(link.state.life, m), sent, { headers, call: it });
  if (isDiscovery && found.result) link.offers = Promise.resolve(offersIn(found.result));
  return found;
}

/** A tool's call, or the answers to what its task has asked. */
async function call(link: Link, it: Call, m: Request): Promise<Message> {
  const { kept } = it;
  const { keeps } = await offers(link);
  if (!kept.task) {
    if (keeps) {
      kept.key = btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(24))));
      kept.began = Date.now();
    }
    link.state.calls[it.id] = kept;
    save(link);
  }
  return run(link, it, m.params, Sent.Keyed);
}

/** Take a call to its answer: by its request, and by its task where it becomes one. */
async function run(link: Link, it: Call, params: Request['params'], sent: Sent): Promise<Message> {
  const { kept, answered } = it;
  const { inputResponses = {} } = (params ?? {}) as { inputResponses?: object };
  if (!kept.task) {
    const found = await sendCall(link, it, params, sent);
    const { resultType, taskId } = (found.result ?? {}) as { resultType?: string; taskId?: string };
    if (resultType !== 'task') return found;
    kept.task = String(taskId);
    save(link);
  } else if (params?.['requestState'] === stateOf(it)) {
    await own(link, 'tasks/update', { taskId: kept.task, inputResponses }, { call: it });
    for (const key of Object.keys(inputResponses)) answered?.add(key);
  }
  return follow(link, it);
}

async function sendCall(link: Link, it: Call, params: Request['params'], sent: Sent): Promise<Message> {
  const { kept } = it;
  const plain = outgoing(link.state.life, message({ id: kept.id, method: kept.method, params: params ?? {} }) as Request);
  const _meta = { ...(plain.params?.['_meta'] as object), ...(kept.key && { [KEY]: kept.key }) };
  const m = { ...plain, id: it.id, params: { ...plain.params, _meta } };
  const take = (told: Message) => {
    if (told.method === 'notifications/progress') it.progress = told.params?.['progress'] as number;
    route(link, told, it);
  };
  const asking = { headers: kept.headers, call: it, take };
  if (kept.key) return ask(link, m, sent, { ...asking, attempts: Infinity, isCut: true });
  for (let runs = 1; ; runs++) {
    try {
      return await ask(link, { ...m, id: `${it.id}/${runs}` }, Sent.Call, asking);
    } catch (error) {
      const isUnknown = error instanceof OutcomeUnknown && runs < MOST_RUNS;
      if (!isUnknown || !(await mayRunAgain(link, kept.params?.['name']))) throw error;
      await link.page.pause(wait(runs));
    }
  }
}

/** Whether a tool says of itself that it may run twice. */
async function mayRunAgain(link: Link, name: unknown): Promise<boolean> {
  let cursor: unknown;
  for (let page = 0; page < TOOL_PAGES; page++) {
    const { result } = await own(link, 'tools/list', cursor ? { cursor } : {});
    const { tools, nextCursor } = (result ?? {}) as { tools?: { name: string; annotations?: Record<string, unknown> }[]; nextCursor?: unknown };
    const { annotations } = tools?.find((tool) => tool.name === name) ?? {};
    if (annotations) return annotations['readOnlyHint'] === true || annotations['idempotentHint'] === true;
    if (!nextCursor) break;
    cursor = nextCursor;
  }
  return false;
}

/** The client is given the answer; or a question of the task, and then the call goes on with the next request. */
function finish(link: Link, it: Call, m: Message): void {
  if (link.page.leaving) return; // the next page will ask for it
  if (isRound(m) && it.kept.task) guard(link, link.hand, { ...m, id: it.kept.id });
  else answer(link, it, m);
  save(link);
}

/** The client does not wait for it any more. */
async function cancelled(link: Link, id: Id): Promise<void> {
  for (const it of [...link.running.values()]) {
    if (it.kept.id !== id || it.recovered) continue;
    it.kept.cancelled = true;
    forget(link, it);
    save(link);
    await end(link, it);
  }
}

/** Stop a call that its client gave up. The storage keeps it until the server has answered, because the page may go before. */
export async function end(link: Link, it: Call): Promise<void> {
  await drop(link, it);
  delete link.state.calls[it.id];
  save(link);
}

/** Ask the server to stop a call. Without a handle and a key, the end of its connection has. */
export async function drop(link: Link, { kept }: Call): Promise<void> {
  const { task, key } = kept;
  if (task) await own(link, 'tasks/cancel', { taskId: task });
  else if (key) await own(link, CANCEL, { key });
}

/** A call of a page before this one goes on. */
export async function goOn(link: Link, it: Call): Promise<void> {
  if (it.goes) return;
  it.goes = true;
  const { kept } = it;
  try {
    await mayGoOn(link, it);
    let { params } = kept;
    for (;;) {
      const m = await run(link, it, params, Sent.KeyedAgain);
      if (!isRound(m)) return finish(link, it, m);
      const { inputRequests, requestState } = m.result as InputRequired;
      params = { ...params, requestState, inputResponses: await answersTo(link, it.recovered as RecoveredCall, inputRequests) };
    }
  } catch (error) {
    if (!link.closed) settle(link, it, error as Error);
    save(link);
  }
}

/** To ask for a task runs nothing; a key that the server has forgotten would. */
async function mayGoOn(link: Link, { kept }: Call): Promise<void> {
  const { task, key, began = 0, params } = kept;
  if (task) return;
  const { keeps = 0 } = await offers(link);
  const isKeyed = !!key && Date.now() - began < keeps;
  if (!isKeyed) delete kept.key;
  if (params && (isKeyed || (!key && (await mayRunAgain(link, params['name']))))) return;
  throw unknown(kept, 'the page went');
}

async function answersTo(link: Link, call: RecoveredCall, questions: InputRequired['inputRequests']): Promise<object> {
  const answers: Record<string, unknown> = {};
  for (const [key, question] of Object.entries(questions ?? {})) {
    while (!call.onquestion) await link.page.pause(wait(0));
    answers[key] = await call.onquestion(question);
  }
  return answers;
}
