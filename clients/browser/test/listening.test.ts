import assert from 'node:assert/strict';
import test from 'node:test';
import vectors from './vectors/listening.json';
import { Subscription } from '../src/subscription.ts';

interface Step {
  hear?: string;
  params?: Record<string, unknown>;
  hand_on?: boolean;
  cues?: unknown[];
  end?: string;
  listens_again?: number;
}

for (const { name, steps } of vectors.stories as { name: string; steps: Step[] }[])
  test(name, () => {
    const subscription = new Subscription();
    for (const { hear, params, hand_on, cues, end, listens_again } of steps)
      if (hear) assert.deepEqual(subscription.heard(hear, params), hand_on ? cues : undefined);
      else {
        const again = subscription.ended(end === 'error');
        assert.equal(again ? subscription.barren : undefined, listens_again);
      }
  });
