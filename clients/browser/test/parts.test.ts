import assert from 'node:assert/strict';
import test from 'node:test';
import methods from './vectors/methods.json';
import { LONGEST_WAIT, wait } from '../src/backoff.ts';
import { headerValue, offersIn, withTasks } from '../src/requests.ts';
import { watch } from '../src/page.ts';
import { fresh, type Kept, type KeyValue, load, MOST, save } from '../src/state.ts';
import { CAPABILITIES, envelopeOf, isKept, isRepeatable, isModern, outgoing, type Request, VERSION, wireId } from '../src/wire.ts';

test('the first attempt comes when the server asked for it', () => {
  assert.equal(wait(0, 5000), 5000);
  assert.equal(wait(0, undefined), 1000);
});

test('waits grow to a bound, and half of each is left to chance', () => {
  for (let attempt = 1; attempt < 40; attempt++) {
    assert.ok(wait(attempt, 100, 1) <= LONGEST_WAIT);
    assert.equal(wait(attempt, 100, 0) * 2, wait(attempt, 100, 1));
  }
  assert.ok(wait(1, 100, 1) < wait(2, 100, 1));
});

test('a server that asks for more than the bound gets it', () => {
  assert.equal(wait(0, 60_000), 60_000);
  assert.equal(wait(5, 60_000, 1), 60_000);
});

test('requests and their tokens carry the number of the page', () => {
  const call: Request = { jsonrpc: '2.0', id: 7, method: 'tools/call', params: { name: 'x', _meta: { progressToken: 7, a: 1 } } };
  assert.deepEqual(outgoing(3, call), {
    jsonrpc: '2.0',
    id: '3-7',
    method: 'tools/call',
    params: { name: 'x', _meta: { progressToken: '3-7', a: 1 } },
  });
  assert.equal((call.params as { _meta: { progressToken: number } })._meta.progressToken, 7);
  assert.notEqual(wireId(1, 7), wireId(1, '7'));
});

test('what may be sent twice is what the server and the Python clients send twice', () => {
  for (const method of [...methods.repeatable, 'initialize']) assert.ok(isRepeatable(method), method);
  for (const method of methods.once) assert.ok(isKept(method) && !isRepeatable(method), method);
});

test('what a page makes again is not kept for it', () => {
  for (const method of ['initialize', 'ping', 'tools/list', 'logging/setLevel', 'resources/subscribe'])
    assert.ok(!isKept(method) && isRepeatable(method), method);
  assert.ok(isKept('tools/call') && !isRepeatable('tools/call'));
  assert.ok(isKept('resources/read') && isRepeatable('resources/read'));
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

function keptIn(storage: KeyValue): [Kept, unknown[]] {
  const errors: unknown[] = [];
  return [{ storage, key: 'k', state: fresh(), page: { leaving: false }, report: (error) => errors.push(error) }, errors];
}

test('only a whole state of ours is taken from storage', () => {
  const storage = new Small(1e6);
  const [kept] = keptIn(storage);
  save(kept);
  assert.deepEqual(load(kept), kept.state);
  for (const text of ['', 'null', '[]', '{', '{"v":2}', JSON.stringify({ ...kept.state, calls: undefined })]) {
    storage.setItem('k', text);
    assert.equal(load(kept), undefined, text);
  }
});

test('when it is tight, the arguments of calls go first', () => {
  const [kept, errors] = keptIn(new Small(400));
  kept.state.calls['1-1'] = { id: 1, method: 'tools/call', params: { x: 'x'.repeat(500) }, position: 'p' };
  save(kept);
  assert.deepEqual(load(kept)?.calls['1-1'], { id: 1, method: 'tools/call', position: 'p' });
  assert.deepEqual(errors, []);
});

test('a write that fails leaves nothing behind, and is told once', () => {
  const [kept, errors] = keptIn(new Small(200));
  save(kept);
  assert.ok(load(kept));
  kept.state.standalone = 'x'.repeat(500);
  save(kept);
  save(kept);
  assert.equal(load(kept), undefined);
  assert.equal(errors.length, 1);
});

test('the oldest calls and questions go when there are too many', () => {
  const [kept] = keptIn(new Small(1e6));
  for (let n = 0; n < MOST + 2; n++) {
    kept.state.calls[`1-${n}`] = { id: n, method: 'tools/call' };
    kept.state.asks[`a-${n}`] = { jsonrpc: '2.0', id: n, method: 'ping' };
  }
  save(kept);
  const { calls, asks } = load(kept) ?? fresh();
  assert.deepEqual([Object.keys(calls).length, Object.keys(calls)[0]], [MOST, '1-2']);
  assert.deepEqual([Object.keys(asks).length, Object.keys(asks)[0]], [MOST, 'a-2']);
});

test('no wait is too long for a timer', async () => {
  const page = watch(1000, { look() {}, offline() {} });
  let over = false;
  const waiting = page.pause(Number.MAX_SAFE_INTEGER).then(() => (over = true));
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.ok(!over);
  page.end();
  await waiting;
});

test('names that no header can hold go as base64', () => {
  for (const plain of ['bake', 'a b', 'notes://today?x=1', '~'])
    assert.equal(headerValue(plain), plain);
  const others = { 'käse': 'a8Okc2U=', '': '', ' x': 'IHg=', 'x ': 'eCA=', 'a\nb': 'YQpi', '=?base64?eA==?=': 'PT9iYXNlNjQ/ZUE9PT89' };
  for (const [text, encoded] of Object.entries(others)) assert.equal(headerValue(text), `=?base64?${encoded}?=`);
});

test('a server says whether it knows keys, and how long it keeps them', () => {
  const from = (extensions?: object) => offersIn({ capabilities: { extensions } });
  assert.deepEqual(from({ 'dev.perdure/calls': { keptMs: 5 }, 'io.modelcontextprotocol/tasks': {} }), { keeps: 5 });
  assert.deepEqual(from({ 'dev.perdure/calls': {} }), { keeps: 3_600_000 });
  for (const nothing of [from(), from({}), offersIn(undefined), offersIn({})])
    assert.deepEqual(nothing, { keeps: undefined });
});

test('the envelope of a request is found, and tasks are declared beside what the client declares', () => {
  const envelope = { [VERSION]: '2026-07-28', [CAPABILITIES]: { roots: {}, extensions: { x: {} } } };
  const call: Request = { jsonrpc: '2.0', id: 1, method: 'tools/call', params: { _meta: { ...envelope, progressToken: 1 } } };
  assert.ok(isModern(call) && !isModern({ jsonrpc: '2.0', id: 1, method: 'ping' }));
  assert.deepEqual(envelopeOf(call), envelope);
  const extensions = { x: {}, 'io.modelcontextprotocol/tasks': {}, 'dev.perdure/calls': {} };
  assert.deepEqual(withTasks(envelope), { [VERSION]: '2026-07-28', [CAPABILITIES]: { roots: {}, extensions } });
});
