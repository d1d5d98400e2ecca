import assert from 'node:assert/strict';
import test from 'node:test';
import vectors from './vectors/delivery.json';
import * as delivery from '../src/delivery.ts';
import { Meaning, Sent } from '../src/delivery.ts';
import type { Id, Message } from '../src/wire.ts';

const MEANINGS: Record<string, Meaning> = {
  follow: Meaning.Follow,
  answer: Meaning.Answer,
  again: Meaning.Again,
  restart: Meaning.Restart,
  renew: Meaning.Renew,
  unknown: Meaning.Unknown,
  unreachable: Meaning.Unreachable,
  refused: Meaning.Refused,
};

const ID = 7;
const error = { code: -32603, message: 'no' };

/** A message of each kind, to the request with that id. */
const BODIES: Record<string, Partial<Message> | undefined> = {
  none: undefined,
  result: { id: ID, result: {} },
  error: { id: ID, error },
  'error without id': { error },
  'error of another': { id: 'server-error', error },
};

const OTHERS: Record<string, Sent> = {
  notification: Sent.Notification,
  reply: Sent.Reply,
  handshake: Sent.Handshake,
  listener: Sent.Listener,
};

interface Attempt {
  purpose: string;
  is_repeatable?: boolean;
  has_position?: boolean;
  may_have_arrived?: boolean;
}

function sent({ purpose, is_repeatable, has_position, may_have_arrived }: Attempt): Sent {
  if (purpose === 'keyed') return may_have_arrived ? Sent.KeyedAgain : Sent.Keyed;
  if (purpose !== 'call') return OTHERS[purpose] as Sent;
  if (has_position) return is_repeatable ? Sent.ReadResumed : Sent.CallResumed;
  return is_repeatable ? Sent.Read : Sent.Call;
}

for (const vector of vectors.responses)
  test(vector.name, () => {
    const { status, media, body = 'none', says_when = false, may_renew = false, has_position = false } = vector;
    const isStream = delivery.isStream(status, media);
    const seen = { status, isStream, answer: BODIES[body], id: ID, saysWhen: says_when, mayRenew: may_renew, hasPosition: has_position };
    assert.equal(delivery.ofResponse(sent(vector), seen), MEANINGS[vector.meaning]);
  });

for (const vector of vectors.failures)
  test(vector.name, () => {
    const row = (delivery as unknown as Record<string, string>)[vector.failure.toUpperCase()] as string;
    assert.equal(delivery.ofFailure(sent(vector), row), MEANINGS[vector.meaning]);
  });

/** With which statuses a message settles a call: that tells its kind. */
const settles = (answer: unknown, id: Id) =>
  [200, 400, 500].map((status) => delivery.ofResponse(Sent.Call, { status, isStream: false, answer: answer as Message, id }));

for (const { message, id, body } of vectors.bodies)
  test(`${JSON.stringify(message)} to ${JSON.stringify(id)}`, () => {
    assert.deepEqual(settles(message, id), settles(BODIES[body], ID));
  });

test('each kind of message but the missing one settles a call with other statuses', () => {
  assert.equal(new Set(Object.values(BODIES).map((answer) => settles(answer, ID).join())).size, Object.keys(BODIES).length);
});

test('an event stream may have parameters, and another one is none', () => {
  assert.ok(delivery.isStream(200, 'Text/Event-Stream; charset=utf-8'));
  assert.ok(!delivery.isStream(200, 'text/html') && !delivery.isStream(200, null) && !delivery.isStream(204, 'text/event-stream'));
});

test('every status has a meaning for everything that is sent', () => {
  for (let status = 100; status < 600; status++)
    for (let sent = Sent.Call; sent <= Sent.KeyedAgain; sent++)
      for (const answer of Object.values(BODIES))
        for (const flag of [false, true]) {
          const seen = { status, isStream: flag && status === 200, answer, id: ID, saysWhen: flag, mayRenew: flag, hasPosition: flag };
          assert.match(delivery.ofResponse(sent, seen), /^[FAGSNUXR]$/);
        }
});
