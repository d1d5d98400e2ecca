import assert from 'node:assert/strict';
import test from 'node:test';
import { LONGEST_WAIT, wait } from '../src/backoff.ts';
import { OutcomeUnknown, PerdureError, SessionLost } from '../src/errors.ts';
import { fresh, Keeper, type KeyValue, MAX_CALLS, parse } from '../src/state.ts';
import { Ids, isKept, isRepeatable, type Message } from '../src/wire.ts';

test('the first attempt comes when the server asked for it', () => {
  assert.equal(wait(0, 5000), 5000);
  assert.equal(wait(0, undefined), 1000);
});

test('waits grow to a bound, and half of each is left to chance', () => {
  for (let attempt = 1; attempt < 40; attempt++) {
    assert.ok(wait(attempt, 100, () => 1) <= LONGEST_WAIT);
    assert.equal(wait(attempt, 100, () => 0) * 2, wait(attempt, 100, () => 1));
  }
  assert.ok(wait(1, 100, () => 1) < wait(2, 100, () => 1));
});

test('a server that asks for more than the bound gets it', () => {
  assert.equal(wait(0, 60_000), 60_000);
  assert.equal(wait(5, 60_000, () => 1), 60_000);
});

test('requests, tokens and cancellations carry the number of the page', () => {
  const ids = new Ids(3);
  const call: Message = { jsonrpc: '2.0', id: 7, method: 'tools/call', params: { name: 'x', _meta: { progressToken: 7, a: 1 } } };
  assert.deepEqual(ids.out(call), {
    jsonrpc: '2.0',
    id: '3-7',
    method: 'tools/call',
    params: { name: 'x', _meta: { progressToken: '3-7', a: 1 } },
  });
  assert.equal((call.params as { _meta: { progressToken: number } })._meta.progressToken, 7);
  const cancel: Message = { jsonrpc: '2.0', method: 'notifications/cancelled', params: { requestId: 7, reason: 'r' } };
  assert.deepEqual(ids.out(cancel).params, { requestId: '3-7', reason: 'r' });
});

test('answers to the server keep its ids, and the ids 7 and "7" stay two', () => {
  const ids = new Ids(1);
  const answer: Message = { jsonrpc: '2.0', id: 'ask-1', result: {} };
  assert.equal(ids.out(answer), answer);
  assert.notEqual(ids.wire(7), ids.wire('7'));
});

test('what a page makes again is not kept for it', () => {
  for (const method of ['initialize', 'ping', 'tools/list', 'logging/setLevel', 'resources/subscribe'])
    assert.ok(!isKept(method) && isRepeatable(method), method);
  assert.ok(isKept('tools/call') && !isRepeatable('tools/call'));
  assert.ok(isKept('resources/read') && isRepeatable('resources/read'));
});

test('only a whole state of ours is taken from storage', () => {
  const state = fresh();
  assert.deepEqual(parse(JSON.stringify(state)), state);
  for (const text of [null, '', 'null', '[]', '{', '{"v":2}', JSON.stringify({ ...state, calls: undefined })])
    assert.equal(parse(text), undefined, String(text));
});

/** Storage with room for so many characters. */
class Small implements KeyValue {
  readonly items = new Map<string, string>();
  constructor(private readonly room: number) {}
  getItem = (key: string) => this.items.get(key) ?? null;
  removeItem = (key: string) => void this.items.delete(key);
  setItem(key: string, value: string): void {
    if (value.length > this.room) throw new DOMException('full', 'QuotaExceededError');
    this.items.set(key, value);
  }
}

function keeperIn(storage: KeyValue): [Keeper, Error[]] {
  const errors: Error[] = [];
  return [new Keeper(storage, 'k', (error) => errors.push(error)), errors];
}

test('when it is tight, the arguments of calls go first', () => {
  const storage = new Small(400);
  const [keeper, errors] = keeperIn(storage);
  keeper.state.calls['1-1'] = { id: 1, method: 'tools/call', params: 'x'.repeat(500), position: 'p' };
  keeper.save();
  assert.deepEqual(keeper.load()?.calls['1-1'], { id: 1, method: 'tools/call', position: 'p' });
  assert.deepEqual(errors, []);
});

test('a write that fails leaves nothing behind, and is told once', () => {
  const storage = new Small(200);
  const [keeper, errors] = keeperIn(storage);
  keeper.save();
  assert.ok(keeper.load());
  keeper.state.standalone = 'x'.repeat(500);
  keeper.save();
  keeper.save();
  assert.equal(keeper.load(), undefined);
  assert.equal(errors.length, 1);
});

test('the oldest calls go when there are too many', () => {
  const [keeper] = keeperIn(new Small(1e6));
  for (let n = 0; n < MAX_CALLS + 2; n++) keeper.state.calls[`1-${n}`] = { id: n, method: 'tools/call' };
  keeper.save();
  const kept = Object.keys(keeper.load()?.calls ?? {});
  assert.equal(kept.length, MAX_CALLS);
  assert.equal(kept[0], '1-2');
});

test('an unknown outcome names what was asked', () => {
  const error = new SessionLost('tools/call', { name: 'pay', arguments: {} }, 'gone');
  assert.ok(error instanceof OutcomeUnknown && error instanceof PerdureError);
  assert.deepEqual(error.data, { outcome: 'unknown', reason: 'gone', method: 'tools/call', name: 'pay' });
});
