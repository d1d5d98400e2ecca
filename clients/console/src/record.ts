// One session as it is known here: its streams with their events, gaps, re-runs and readers, and the rows of its timeline.
import type { LogEvent, LogGap, LogOpened, Session, StreamRow } from './api.ts';
import { summarize } from './messages.ts';

/** Events that are kept of one session, the newest: what is let go can be loaded again. */
export const MOST_EVENTS = 3_000;

/** Readers that came or left, while this page looked. */
const MOST_NOTES = 200;

export type Row =
  | { is: 'event'; key: string; time: number; order: number; stream: string; event: LogEvent }
  | { is: 'gap'; key: string; time: number; order: number; stream: string; first: number; last: number }
  | { is: 'rerun' | 'writer'; key: string; time: number; order: number; stream: string; text: string }
  | { is: 'opened'; key: string; time: number; order: number; stream: string; text: string }
  | { is: 'reader'; key: string; time: number; order: number; stream: string; text: string };

interface Rerun {
  after: number;
  generation: number;
  /** When this page saw it; else the time of the next event tells. */
  seen: number | null;
}

export class Stream {
  readonly events: LogEvent[] = [];
  readonly gaps: LogGap[] = [];
  readonly reruns = new Map<number, Rerun>();
  /** Calls on it, as they are called. */
  title = '';
  attempt = 1;
  /** Its tool does steps: a second run goes on behind those that have ended. */
  hasSteps = false;

  constructor(public facts: StreamRow) {}

  get id(): string {
    return this.facts.id;
  }

  /** As far as its readers have got; `null` where that says nothing: nobody has read, or all is read and over. */
  get readTo(): number | null {
    const { reader, delivered = 0, sealed, last } = this.facts;
    const through = Math.max(reader?.seq ?? 0, delivered);
    return through === 0 || (sealed && through >= last) ? null : through;
  }

  get first(): number {
    return this.events[0]?.seq ?? this.facts.last + 1;
  }

  /** Whether events that are older than those here may still be in the store. */
  get hasEarlier(): boolean {
    const least = this.gaps.reduce((seq, gap) => (gap.first <= 1 ? Math.max(seq, gap.last) : seq), 0);
    return this.first > least + 1 && this.facts.last > 0;
  }

  /** Takes an event in its place; `false` if it is here already. */
  add(event: LogEvent): boolean {
    let at = this.events.length;
    while (at > 0 && (this.events[at - 1] as LogEvent).seq > event.seq) at -= 1;
    if (this.events[at - 1]?.seq === event.seq) return false;
    this.events.splice(at, 0, event);
    if (event.seq > this.facts.last) this.facts.last = event.seq;
    return true;
  }

  addGap(gap: LogGap): void {
    if (this.gaps.some(({ first, last }) => first <= gap.first && gap.last <= last)) return;
    const rest = this.gaps.filter(({ first, last }) => first < gap.first || gap.last < last);
    this.gaps.splice(0, this.gaps.length, ...rest, gap);
  }

  /** The last progress, in words. */
  get progress(): string {
    for (let at = this.events.length - 1; at >= 0; at -= 1) {
      const { is, title } = summarize((this.events[at] as LogEvent).message);
      if (is === 'progress') return title;
    }
    return '';
  }

  /** Where another writer went on; `attempt` is that of a call that was run again by it. */
  changes(): { after: number; generation: number; time: number; attempt: number | null }[] {
    const known = [...this.reruns.values()];
    return known.map(({ after, generation, seen }, index) => {
      const later = known.length - 1 - index;
      const isRerun = this.facts.kind === 'call' && this.attempt - 1 > later;
      const next = this.events.find((event) => event.seq > after)?.time;
      const time = next !== undefined && seen !== null ? Math.min(seen, next) : (next ?? seen ?? this.timeOf(after));
      return { after, generation, time, attempt: isRerun ? this.attempt - later : null };
    });
  }

  timeOf(seq: number): number {
    return this.events.find((event) => event.seq >= seq)?.time ?? this.events.at(-1)?.time ?? this.facts.opened;
  }

  /** The id of an event on the wire, as it is sent now: it carries the generation of the present writer. */
  position(seq: number): string {
    const digits = (value: number, many: number): string => String(value).padStart(many, '0');
    return `${this.facts.kind === 'call' ? 'c' : 's'}${this.id}.${digits(this.facts.generation, 6)}.${digits(seq, 10)}`;
  }
}

export class SessionRecord {
  readonly streams = new Map<string, Stream>();
  readonly notes: Row[] = [];
  private count = 0;
  private noted = 0;

  constructor(public facts: Session) {
    this.take(facts, null);
  }

  /** Takes the session as it is now; `seen` is the time if this is news. */
  take(facts: Session, seen: number | null): void {
    this.facts = facts;
    const known = new Set<string>();
    for (const row of facts.streams) {
      known.add(row.id);
      const stream = this.streams.get(row.id);
      if (stream) this.compare(stream, row, seen);
      else this.streams.set(row.id, new Stream(row));
    }
    for (const [id, stream] of this.streams) if (!known.has(id) && !stream.events.length) this.streams.delete(id);
    for (const stream of this.streams.values()) this.describe(stream, seen);
  }

  private describe(stream: Stream, seen: number | null): void {
    const calls = this.facts.calls.filter((call) => call.stream === stream.id);
    if (calls.length) {
      // The store forgets which resource was asked for when the call has ended.
      if (!stream.title || calls.every((call) => call.name !== null)) stream.title = calls.map((call) => call.name ?? call.method).join(', ');
      stream.attempt = Math.max(...calls.map((call) => call.attempt));
      stream.hasSteps = calls.some((call) => call.steps.length > 0);
    } else if (!stream.title && stream.facts.kind !== 'call') stream.title = 'standalone';
    for (const { generation, end } of stream.facts.generations)
      if (!stream.reruns.has(generation)) stream.reruns.set(generation, { after: end, generation, seen });
  }

  private compare(stream: Stream, row: StreamRow, seen: number | null): void {
    const before = stream.facts;
    stream.facts = { ...row, last: Math.max(row.last, stream.events.at(-1)?.seq ?? 0) };
    const text = seen === null ? null : newsOfReader(before, row);
    if (seen === null || text === null) return;
    const key = `reader ${(this.noted += 1)}`;
    this.notes.push({ is: 'reader', key, time: seen, order: row.last + 0.5, stream: row.id, text });
    if (this.notes.length > MOST_NOTES) this.notes.shift();
  }

  open(seen: LogOpened): void {
    let stream = this.streams.get(seen.stream);
    if (!stream) {
      const facts = { id: seen.stream, kind: seen.kind, last: 0, sealed: false, generation: 1, opened: seen.time };
      stream = new Stream({ ...facts, node: null, reader: null, generations: [], delivered: 0, unread: false });
      this.streams.set(seen.stream, stream);
    }
    if (seen.calls.length) stream.title = seen.calls.map((call) => call.name ?? call.method).join(', ');
  }

  add(item: LogEvent | LogGap): void {
    const stream = this.streams.get(item.stream);
    if (!stream) return;
    if (item.what === 'gap') stream.addGap(item);
    else if (stream.add(item)) this.count += 1;
    if (this.count > MOST_EVENTS) this.forget();
  }

  /** Let the oldest tenth go. */
  private forget(): void {
    const times = [...this.streams.values()].flatMap((stream) => stream.events.map((event) => event.time)).sort((a, b) => a - b);
    const least = times[Math.floor(times.length / 10)] ?? 0;
    this.count = 0;
    for (const stream of this.streams.values()) {
      while ((stream.events[0]?.time ?? least) < least) stream.events.shift();
      this.count += stream.events.length;
    }
  }

  /** The timeline, the oldest first. */
  rows(only: (stream: Stream) => boolean): Row[] {
    const rows = this.notes.filter((row) => only(this.streams.get(row.stream) as Stream));
    for (const stream of this.streams.values()) if (only(stream)) rows.push(...rowsOf(stream));
    return rows.sort((a, b) => a.time - b.time || (a.stream < b.stream ? -1 : a.stream > b.stream ? 1 : a.order - b.order));
  }
}

/** What happened to the reader of a stream between two looks, if anything did. */
function newsOfReader(before: StreamRow, now: StreamRow): string | null {
  if (!before.unread && now.unread) return 'the reader left before the end';
  if (before.unread && !now.unread) return 'a reader has come to the end';
  if (!before.reader && now.reader) return `a reader came to node ${now.reader.node.slice(0, 8)}`;
  return before.reader && !now.reader && !now.sealed ? `the reader left node ${before.reader.node.slice(0, 8)}` : null;
}

function rowsOf(stream: Stream): Row[] {
  const { id, facts } = stream;
  const rows: Row[] = stream.events.map((event) => ({
    is: 'event',
    key: `${id} ${event.seq}`,
    time: event.time,
    order: event.seq,
    stream: id,
    event,
  }));
  for (const { first, last } of stream.gaps)
    rows.push({ is: 'gap', key: `${id} gap ${first}`, time: stream.timeOf(last + 1), order: last + 0.1, stream: id, first, last });
  for (const { after, generation, time, attempt } of stream.changes()) {
    const from = stream.hasSteps ? 'behind its finished steps' : 'from the start';
    const text = attempt === null ? `another node writes from here: generation ${generation + 1}` : `run again ${from}: attempt ${attempt}`;
    rows.push({ is: attempt === null ? 'writer' : 'rerun', key: `${id} rerun ${generation}`, time, order: after + 0.2, stream: id, text });
  }
  if (!stream.hasEarlier)
    rows.push({ is: 'opened', key: `${id} opened`, time: facts.opened, order: -1, stream: id, text: facts.kind === 'call' ? 'called' : 'opened' });
  return rows;
}
