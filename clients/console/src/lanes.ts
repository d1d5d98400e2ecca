// The streams of a session as lanes over one span of time: events, answers, gaps, re-runs and the reader's place.
import { arrange, h, mark, replace, say, svg } from './dom.ts';
import { clock, number, plain, plural, short } from './format.ts';
import { summarize } from './messages.ts';
import type { SessionRecord, Stream } from './record.ts';
import { now } from './times.ts';

const WIDTH = 1000;
const HEIGHT = 22;
const MIDDLE = HEIGHT / 2;

/** Lanes that are shown at first, and that are added by the button. */
export const LANES = 12;

/** A gap can be seen, however short the time was in which its events came. */
const LEAST_GAP = 18;

/** Marks of the axis. */
const MARKS = 4;

export class Lanes {
  readonly element: HTMLElement;
  private readonly box: HTMLElement;
  private readonly none = h('p', { class: 'none', hidden: true }, 'It has no stream.');
  private readonly list = h('ol', { class: 'lanes' });
  private readonly axis = h('div', { class: 'axis', 'aria-hidden': 'true' });
  private readonly more = h('button', { type: 'button', class: 'plain', hidden: true, click: () => this.showMore() });
  private readonly lanes = new Map<string, Lane>();
  private limit = LANES;

  /** `onChoose` is told the stream that the person wants to see alone, or `null` for all. */
  constructor(
    private readonly onChoose: (stream: string | null) => void,
    private readonly onMore: () => void,
  ) {
    const key = (is: string, text: string): HTMLElement =>
      h('li', {}, svg('svg', { viewBox: '0 0 16 16', 'aria-hidden': 'true', class: 'key' }, svg('path', { class: is, d: shapes[is] ?? '' })), text);
    const legend = h(
      'ul',
      { class: 'legend', 'aria-label': 'Signs' },
      key('dot', 'event'),
      key('answer', 'answer'),
      key('error', 'error'),
      key('gap', 'gap'),
      key('rerun', 'run again'),
      key('reader', 'read to here'),
    );
    this.box = h('div', { class: 'lanes-box' }, this.list, this.axis, h('div', { class: 'head' }, legend, this.more));
    this.element = h('div', {}, this.box, this.none);
  }

  /** The streams that are shown: the chosen one, open ones, then the newest of the rest; in the order of their beginnings. */
  shown(record: SessionRecord, chosen: string | null): Stream[] {
    const all = [...record.streams.values()];
    const rank = ({ id, facts }: Stream): number => (id === chosen ? 3 : facts.sealed ? 0 : facts.kind === 'call' ? 2 : 1);
    const some = all.sort((a, b) => rank(b) - rank(a) || b.facts.opened - a.facts.opened).slice(0, this.limit);
    return some.sort((a, b) => a.facts.opened - b.facts.opened);
  }

  draw(record: SessionRecord, chosen: string | null): void {
    const streams = this.shown(record, chosen);
    this.box.hidden = !streams.length;
    this.none.hidden = streams.length > 0;
    if (!streams.length) return;
    const [from, to] = spanOf(streams);
    const ids = new Set(streams.map((stream) => stream.id));
    for (const id of this.lanes.keys()) if (!ids.has(id)) this.lanes.delete(id);
    arrange(
      this.list,
      streams.map((stream) => {
        const lane = this.lanes.get(stream.id) ?? new Lane(stream, this.onChoose);
        this.lanes.set(stream.id, lane);
        lane.draw(stream, chosen, (time) => (to > from ? ((time - from) / (to - from)) * WIDTH : WIDTH));
        return lane.element;
      }),
    );
    const hidden = record.streams.size - streams.length;
    const beyond = record.facts.left_out ? `, ${number(record.facts.left_out)} more are only in the store` : '';
    this.more.hidden = hidden <= 0;
    const some = hidden > LANES ? `${number(LANES)} of ` : '';
    say(this.more, `Show ${some}${plural(hidden, 'older stream')}${beyond}`);
    const marks = Array.from({ length: MARKS }, (_, index) => from + ((to - from) * index) / (MARKS - 1));
    if (this.axis.children.length !== MARKS) replace(this.axis, ...marks.map(() => h('span', {})));
    marks.forEach((time, index) => say(this.axis.children[index] as Element, clock(time).slice(0, to - from < 10 ? 12 : 8)));
  }

  private showMore(): void {
    this.limit += LANES;
    this.onMore();
  }
}

function spanOf(streams: readonly Stream[]): [number, number] {
  const times = streams.flatMap(({ events, facts }) => [facts.opened, ...events.map((event) => event.time)]);
  const isOpen = streams.some(({ facts }) => facts.kind === 'call' && !facts.sealed);
  const last = Math.max(...times);
  // Of streams that were opened before the events that are here, the time between says little.
  const first = Math.min(...streams.map(({ events, facts, hasEarlier }) => (hasEarlier ? (events[0]?.time ?? facts.opened) : facts.opened)));
  const early = streams.some(({ facts }) => facts.kind === 'call') ? callsBegin(streams, first) : first;
  return [early, isOpen ? Math.max(now(), last) : last];
}

/** A standalone stream is as old as its session; where it is silent, the calls alone give the span. */
function callsBegin(streams: readonly Stream[], first: number): number {
  const begins = streams.flatMap(({ events, facts }) => [
    ...(facts.kind === 'call' ? [facts.opened] : []),
    ...(events[0] ? [Math.min(events[0].time, facts.kind === 'call' ? facts.opened : events[0].time)] : []),
  ]);
  return begins.length ? Math.max(first, Math.min(...begins)) : first;
}

const shapes: Readonly<Record<string, string>> = {
  dot: 'M8 8h0',
  answer: 'M8 8h0',
  error: 'M8 8h0',
  gap: 'M1 8h14',
  rerun: 'M8 2v12',
  reader: 'M8 1v7',
};

class Lane {
  readonly element: HTMLLIElement;
  private readonly label: HTMLButtonElement;
  private readonly name = h('span', { class: 'name' });
  private readonly chips = h('span', { class: 'chips' });
  private readonly chart = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', role: 'img' });
  private readonly paths = new Map<string, SVGPathElement>();

  constructor(stream: Stream, onChoose: (stream: string | null) => void) {
    this.label = h(
      'button',
      {
        type: 'button',
        class: 'lane',
        'aria-pressed': 'false',
        click: () => onChoose(this.label.getAttribute('aria-pressed') === 'true' ? null : stream.id),
      },
      h('code', {}, short(stream.id)),
      this.name,
      this.chips,
    );
    for (const name of ['base', 'gap', 'writer', 'dot', 'answer', 'error', 'rerun', 'reader']) {
      const path = svg('path', { class: name });
      this.paths.set(name, path);
      this.chart.append(path);
    }
    this.element = h('li', {}, this.label, this.chart);
  }

  draw(stream: Stream, chosen: string | null, x: (time: number) => number): void {
    const { facts, events, attempt } = stream;
    say(this.name, plain(stream.title) || facts.kind);
    const read = stream.readTo === null ? '' : `read to ${number(stream.readTo)}`;
    const chips = [attempt > 1 ? `attempt ${attempt}` : '', facts.unread ? 'was cut' : read];
    const shown = chips.filter(Boolean);
    if (this.chips.textContent !== shown.join(''))
      replace(this.chips, ...shown.map((text) => h('span', { class: text.startsWith('attempt') ? 'chip warn' : 'chip' }, text)));
    mark(this.label, 'aria-pressed', String(chosen === stream.id));
    mark(this.element, 'data-dim', chosen !== null && chosen !== stream.id ? '' : null);
    for (const [name, path] of Object.entries(drawn(stream, x))) mark(this.paths.get(name) as Element, 'd', path || 'M0 0');
    const told = [plural(events.length, 'event'), ...(stream.gaps.length ? ['a gap'] : []), ...(attempt > 1 ? [`attempt ${attempt}`] : [])];
    mark(this.chart, 'aria-label', `${plain(stream.title) || facts.kind}: ${[...told, facts.sealed ? 'answered' : 'open'].join(', ')}`);
  }
}

function drawn(stream: Stream, x: (time: number) => number): Record<string, string> {
  const { facts, events, gaps } = stream;
  const at = (time: number): string => Math.min(Math.max(x(time), 2), WIDTH - 2).toFixed(1);
  const dots = (some: typeof events): string => some.map((event) => `M${at(event.time)} ${MIDDLE}h0`).join('');
  const failed = (event: (typeof events)[number]): boolean => event.final && summarize(event.message).is === 'error';
  const end = facts.sealed ? (events.at(-1)?.time ?? facts.opened) : now();
  const gap = gaps.map(({ first, last }) => {
    const to = at(stream.timeOf(last + 1));
    const from = Math.min(Number(at(first <= 1 ? facts.opened : stream.timeOf(first - 1))), Number(to) - LEAST_GAP);
    return `M${from} ${MIDDLE}H${to}`;
  });
  const changes = (isRerun: boolean): string =>
    stream
      .changes()
      .filter(({ attempt }) => (attempt !== null) === isRerun)
      .map(({ time }) => `M${at(time)} 2v${HEIGHT - 4}`)
      .join('');
  const read = stream.readTo !== null && events.length ? at(stream.timeOf(stream.readTo)) : null;
  return {
    base: `M${at(facts.opened)} ${MIDDLE}H${at(end)}`,
    gap: gap.join(''),
    dot: dots(events.filter((event) => !event.final)),
    answer: dots(events.filter((event) => event.final && !failed(event))),
    error: dots(events.filter(failed)),
    writer: changes(false),
    rerun: changes(true),
    reader: read === null ? '' : `M${read} 0v6`,
  };
}
