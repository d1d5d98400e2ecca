// Makes rates of the counts that the console sends each second.
import type { Tick } from './api.ts';
import { POINTS, type Point } from './plots.ts';

export class Rates {
  readonly events: Point[] = [];
  readonly calls: Point[] = [];
  readonly running: Point[] = [];
  readonly latency: Point[] = [];
  private last: Tick | null = null;

  add(tick: Tick): void {
    const { last } = this;
    this.last = tick;
    const between = last ? tick.time - last.time : 0;
    // A console that was started again counts from 0.
    const isNext = last !== null && between > 0 && tick.events >= last.events && tick.calls_begun >= last.calls_begun;
    const rate = (now: number, before: number | undefined): number | null =>
      isNext && before !== undefined ? (now - before) / between : null;
    push(this.events, tick, [rate(tick.events, last?.events)]);
    push(this.calls, tick, [rate(tick.calls_begun, last?.calls_begun), rate(tick.calls_ended, last?.calls_ended)]);
    push(this.running, tick, [tick.running]);
    push(this.latency, tick, [tick.latency?.p50 ?? null, tick.latency?.p99 ?? null]);
  }
}

function push(points: Point[], { time }: Tick, values: Point['values']): void {
  points.push({ time, values });
  if (points.length > POINTS) points.shift();
}
