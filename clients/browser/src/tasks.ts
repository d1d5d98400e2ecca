/** Tasks of a server (2026-07-28), followed by `tasks/get` until they end. The client sees the call that each was. */

import { wait } from './backoff.js';
import { type Call, type Question, unknown } from './calls.js';
import { own } from './exchange.js';
import { route } from './incoming.js';
import type { Link } from './link.js';
import { message, type Message } from './wire.js';

/** Milliseconds between two requests where the server does not say, and the least, whatever it says. */
const USUAL = 1000;
const LEAST = 100;
/** JSON-RPC's code for a request that was cancelled, as Perdure's servers give it. */
const CANCELLED = -32800;
/** Errors to `tasks/get` behind which there is no task: the server does not know it, or does not understand the question. */
const GONE = [-32602, -32601, -32020, -32021, -32022];

/** Begins the state of a call whose task has asked something: the client brings it back with the answers. */
const OURS = 'perdure-page.';

/** The state that the client brings back. */
export const stateOf = ({ id, kept }: Call): string | undefined => kept.task && OURS + id;

/** An answer that asks the client something, and to be asked again with what it says. */
export interface InputRequired {
  readonly inputRequests?: Record<string, Question>;
  readonly requestState?: string;
}

interface Task extends InputRequired {
  readonly status: string;
  readonly statusMessage?: string;
  readonly pollIntervalMs?: unknown;
  readonly result?: object;
  readonly error?: Message['error'];
}

export const isRound = ({ result }: Message): boolean => (result as { resultType?: string } | undefined)?.resultType === 'input_required';

/** The answer to the call that became a task; or what its task asks, as the revision asks it of any call. */
export async function follow(link: Link, it: Call): Promise<Message> {
  const { kept } = it;
  for (let failures = 0; ; ) {
    const began = Date.now();
    const { result, error } = await get(link, it);
    const task = (result ?? {}) as Task;
    if (error) {
      if (GONE.includes(error.code)) throw unknown(kept, `the server does not know the task: ${error.message}`);
      await link.page.pause(wait(failures++));
      continue;
    }
    failures = 0;
    const answer = answerIn(it, task);
    if (answer) return answer;
    progress(link, it, task);
    const { pollIntervalMs: asked } = task;
    const interval = typeof asked === 'number' ? Math.max(asked, LEAST) : USUAL;
    await link.page.pause(interval - (Date.now() - began));
  }
}

/** Polls take turns, because servers hold them, and browsers have few connections. */
async function get(link: Link, it: Call): Promise<Message> {
  const turn = { position: undefined, park() {} };
  await link.slots.enter(turn);
  try {
    return await own(link, 'tasks/get', { taskId: it.kept.task }, { call: it, attempts: Infinity, isCut: true });
  } finally {
    link.slots.leave(turn);
  }
}

/** What the client is answered, if there is anything to answer. */
function answerIn(it: Call, task: Task): Message | undefined {
  const { kept, answered } = it;
  const { status, statusMessage: said, result, error } = task;
  if (status === 'completed' && result) return message({ result: { resultType: 'complete', ...result } });
  if (status === 'failed' && error) return message({ error });
  if (status === 'cancelled') return message({ error: { code: CANCELLED, message: said ?? 'Request cancelled' } });
  if (status === 'working') return undefined;
  if (status !== 'input_required') throw unknown(kept, `the task is ${status}, and has no answer`);
  // A server may show a question for a moment after it has its answer.
  const open = Object.entries(task.inputRequests ?? {}).filter(([key]) => !answered?.has(key));
  const asked = { resultType: 'input_required', inputRequests: Object.fromEntries(open), requestState: stateOf(it) };
  return open.length ? message({ result: asked }) : undefined;
}

/** A task has no notifications; a Perdure server says in words how far it is. */
function progress(link: Link, it: Call, { statusMessage }: Task): void {
  const [, done, total, said] = /^([\d.]+)(?: of ([\d.]+))?(?:: ([^]*))?$/.exec(String(statusMessage)) ?? [];
  if (!done || !(+done > (it.progress ?? -1))) return;
  it.progress = +done;
  const params = { progressToken: it.id, progress: +done, ...(total && { total: +total }), ...(said && { message: said }) };
  route(link, message({ method: 'notifications/progress', params }), it);
}
