import assert from 'node:assert/strict';
import test from 'node:test';
import vectors from './vectors/polling.json';
import { afterPoll, Next } from '../src/polling.ts';
import type { Message } from '../src/wire.ts';

const STEPS: Record<string, Next> = {
  poll: Next.Poll,
  answer: Next.Answer,
  result: Next.Result,
  error: Next.Error,
  retry: Next.Retry,
  unknown: Next.Unknown,
};

interface Poll {
  name: string;
  answer: unknown;
  answered?: string[];
  took?: number;
  next: string;
  pause?: number;
  value?: object;
  progress?: object;
}

for (const { name, answer, answered, took, next, pause = 0, value, progress } of vectors.polls as Poll[])
  test(name, () => {
    const found = afterPoll(answer as Message, new Set(answered), took);
    assert.equal(found.next, STEPS[next]);
    assert.ok(Math.abs((found.pause ?? 0) - pause) < 1e-9, String(found.pause));
    assert.deepEqual([found.value, found.progress], [value, progress]);
  });
