import assert from 'node:assert/strict';
import test from 'node:test';
import vectors from './vectors/sse.json';
import { decoder as newDecoder } from '../src/sse.ts';

const encoder = new TextEncoder();

for (const { name, chunks, events, retry } of vectors) {
  for (const whole of [true, false]) {
    test(`${name}, ${whole ? 'as cut' : 'byte by byte'}`, () => {
      const decoder = newDecoder();
      const given = whole
        ? chunks.map((chunk) => encoder.encode(chunk))
        : [...encoder.encode(chunks.join(''))].map((byte) => Uint8Array.of(byte));
      const seen = given.flatMap((chunk) => decoder.feed(chunk));
      assert.deepEqual(seen, events);
      assert.equal(decoder.retry ?? null, retry);
    });
  }
}

test('an event that is too large is refused, and one that just fits is not', () => {
  const decoder = newDecoder(20);
  assert.equal(decoder.feed(encoder.encode('data: 0123456789\n\n')).length, 1);
  assert.throws(() => decoder.feed(encoder.encode(`data: ${'x'.repeat(30)}`)), RangeError);
});
