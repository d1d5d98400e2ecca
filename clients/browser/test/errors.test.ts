import assert from 'node:assert/strict';
import test from 'node:test';
import vectors from './vectors/unknown_outcome.json';
import { OutcomeUnknown, PerdureError, SessionLost } from '../src/errors.ts';

for (const { is, method, params, reason, message, data } of vectors)
  test(`an outcome is unknown: ${is}`, () => {
    const error = new SessionLost(method, params, reason);
    assert.ok(error instanceof OutcomeUnknown && error instanceof PerdureError);
    assert.deepEqual({ message: error.message, data: error.data }, { message, data });
  });
