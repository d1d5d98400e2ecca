/** Tasks of a server (2026-07-28), followed by `tasks/get` until they end. The client sees the call that each was. */

import { wait } from './backoff.js';
import { type Call, type Question, unknown } from './calls.js';
import { own } from './requests.js';
import { route } from './incoming.js';
import type { Link } from './link.js';
import { afterPoll, Next } from './polling.js';
import { message, type Message } from './wire.js';

/** Begins the state of a call whose task has asked something: the client brings it back with the answers. */
const OURS = 'perdure-page.';

/** The state that the client brings back. */
export const stateOf = ({ id, kept }: Call): string | undefined => kept.task && OURS + id;

/** An answer that asks the client something, and to be asked again with what it says. */
export interface InputRequired {
  readonly inputRequests?: Record<string, Question>;
  readonly requestState?: string;
}

export const isRound = ({ result }: Message): boolean => (result as { resultType?: string } | undefined)?.resultType === 'input_required';

/** The answer to the call that became a task; or what its task asks, as the revision asks it of any call. */
export async function follow(link: Link, it: Call): Promise<Message> {
  const { kept, answered } = it;
  for (let failures = 0; ; ) {
    const began = Date.now();
    const found = await get(link, it);
    const { next, value, pause = 0, progress, reason = '' } = afterPoll(found, answered, (Date.now() - began) / 1000);
    if (next === Next.Unknown) throw unknown(kept, reason);
    if (next === Next.Result) return message({ result: value });
    if (next === Next.Error) return message({ error: value as NonNullable<Message['error']> });
    if (next === Next.Answer) return message({ result: { resultType: 'input_required', inputRequests: value, requestState: stateOf(it) } });
    failures = next === Next.Retry ? failures + 1 : 0;
    if (progress && progress.progress > (it.progress ?? -1)) {
      it.progress = progress.progress;
      route(link, message({ method: 'notifications/progress', params: { progressToken: it.id, ...progress } }), it);
    }
    await link.page.pause(failures ? wait(failures - 1) : pause * 1000);
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
