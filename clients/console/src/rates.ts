// Makes rates of the counts that the console sends each second. Nodes write their counts every three seconds, so a rate is that of
// several of their beats.
import type { Tick } from './api.ts';
import { POINTS, type Point } from './plots.ts';

/** Ticks between the two counts of a rate: three beats of a node. */
const SPAN = 9;

export class Rates {
  readonly events: Point[] = [];
  readonly calls: Point[] = [];
  readonly running: Point[] = [];
  readonly latency: Point[] = [];
  private ticks: Tick[] = [];

  add(tick: Tick): void {
    const last = this.ticks.at(-1);
    // A console that was started again counts from 0.
    if (last && (tick.events < last.events || tick.calls_begun < last.calls_begun)) this.ticks = [];
    this.ticks = [...this.ticks.slice(-SPAN), tick];
    const first = this.ticks[0] ?? tick;
    const rate = (name: 'events' | 'calls_begun' | 'calls_ended'): number | null =>
      tick.time > first.time ? (tick[name] - first[name]) / (tick.time - first.time) : null;
    push(this.events, tick, [rate('events')]);
    push(this.calls, tick, [rate('calls_begun'), rate('calls_ended')]);
    push(this.running, tick, [tick.running]);
    push(this.latency, tick, [tick.latency?.p50 ?? null, tick.latency?.p99 ?? null]);
  }
}

function push(points: Point[], { time }: Tick, values: Point['values']): void {
  points.push({ time, values });
  if (points.length > POINTS) points.shift();
}
