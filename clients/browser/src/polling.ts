/**
 * Decides what the answer to one `tasks/get` leads to, and when the task is asked for again.
 * `src/perdure/_core/polling.py` has the same rules; `tests/vectors/polling.json` tests both.
 */

import type { Message } from './wire.js';

/** Seconds between two requests where the server does not say, the least and the most, whatever it says. */
const USUAL = 1;
const LEAST = 0.1;
const MOST = 3600;
const CANCELLED = -32800;
/** Errors after which the task will not be found: the server does not know it, or does not understand the request. */
const GONE = [-32602, -32601, -32020, -32021, -32022, -31020];

/** What to do after one poll. */
export const enum Next {
  /** Ask again after a pause. */
  Poll,
  /** Put the open questions to the user. */
  Answer,
  Result,
  Error,
  /** The request failed: ask again with growing pauses. */
  Retry,
  /** The outcome of the call is unknown. */
  Unknown,
}

export interface Decision {
  readonly next: Next;
  /** Seconds until the next poll. */
  readonly pause?: number;
  /** The result, the error or the open questions. */
  readonly value?: object;
  /** The params of a progress notification, without a token. */
  readonly progress?: Progress | undefined;
  readonly reason?: string;
}

export interface Progress {
  readonly progress: number;
  readonly total?: number;
  readonly message?: string;
}

const objectOf = (value: unknown): Record<string, unknown> | undefined =>
  value && typeof value === 'object' && !Array.isArray(value) ? (value as Record<string, unknown>) : undefined;

/** `answered`: the keys of questions whose answers the server has. `took`: the seconds that the request took. */
export function afterPoll({ result, error }: Partial<Message>, answered?: ReadonlySet<string>, took = 0): Decision {
  if (error)
    return { next: GONE.includes(error.code) ? Next.Unknown : Next.Retry, reason: `no task: ${error.message}` };
  const { status, statusMessage: said, pollIntervalMs: asked, inputRequests, ...task } = objectOf(result) ?? {};
  const interval = typeof asked === 'number' ? Math.min(Math.max(asked / 1000, LEAST), MOST) : USUAL;
  const pause = Math.max(interval - took, 0);
  if (status === 'working') return { next: Next.Poll, pause, progress: progressIn(said) };
  if (status === 'input_required') {
    const open = Object.entries(objectOf(inputRequests) ?? {}).filter(([key]) => !answered?.has(key));
    return open.length ? { next: Next.Answer, pause, value: Object.fromEntries(open) } : { next: Next.Poll, pause };
  }
  const value = objectOf(task[status === 'completed' ? 'result' : 'error']);
  if (status === 'completed' && value) return { next: Next.Result, value: { resultType: 'complete', ...value } };
  if (status === 'failed' && Number.isInteger(value?.['code'])) return { next: Next.Error, value: { message: '', ...value } };
  if (status === 'cancelled')
    return { next: Next.Error, value: { code: CANCELLED, message: typeof said === 'string' ? said : 'The task was cancelled' } };
  return { next: Next.Unknown, reason: `the task is ${String(status)}, and has no answer` };
}

/** A task has no notifications; a Perdure server says in words how far it is. */
function progressIn(said: unknown): Progress | undefined {
  const [, done, total, message] = /^([\d.e+-]{1,32})(?: of ([\d.e+-]{1,32}))?(?:: ([^]*))?$/.exec(typeof said === 'string' ? said : '') ?? [];
  const numbers = { progress: Number(done), ...(total && { total: Number(total) }) };
  return Object.values(numbers).every(Number.isFinite) ? { ...numbers, ...(message && { message }) } : undefined;
}
