// The page of one session, task or call: what it is, and its timeline as it is written.
import { api, type Seen, type Session } from './api.ts';
import { h, mark, replace, say } from './dom.ts';
import { askToEnd } from './ending.ts';
import { Feed, type Trouble } from './feed.ts';
import { NONE, number, plain, short } from './format.ts';
import { Lanes } from './lanes.ts';
import { summarize } from './messages.ts';
import { SessionRecord, type Stream } from './record.ts';
import { StepTable } from './steps.ts';
import { ownerOf, toneOf } from './table.ts';
import { Timeline } from './timeline.ts';
import { ago, now, setNow } from './times.ts';
import { Loader, type Route, type Shell, type View } from './view.ts';

/** Events of a stream that are loaded at once. */
const PAGE = 100;

/** Streams that are loaded at the same time: a browser has six connections to a server, and two of them listen. */
const AT_ONCE = 3;

/** Milliseconds between two drawings: a fast writer must not keep the page busy. */
const DRAW = 120;

const UNENDED = new Set(['running', 'waiting']);

export class SessionView implements View {
  readonly element: HTMLElement;
  private readonly heading = h('h1', { tabindex: '-1' });
  private readonly state = h('span', { class: 'pill' });
  private readonly said = h('p', { class: 'said', role: 'status', hidden: true });
  private readonly facts = h('dl', { class: 'facts' });
  private readonly pending = h('div', { class: 'pending' });
  private readonly end = h('button', { type: 'button', class: 'danger', hidden: true, click: () => this.ask() }, 'End…');
  private readonly copy = h('button', { type: 'button', click: () => void this.copyId() }, 'Copy id');
  private readonly order = h('button', { type: 'button', class: 'plain', click: () => this.turn() });
  private readonly all = h('button', { type: 'button', class: 'plain', hidden: true, click: () => this.choose(null) }, 'Show all streams');
  private readonly steps = new StepTable();
  private readonly lanes: Lanes;
  private readonly timeline: Timeline;
  private readonly body: HTMLElement;
  private readonly loader: Loader;
  /** Loads what moves with each event and is not told by itself: readers, progress, activity. */
  private readonly follower: Loader;
  private readonly control = new AbortController();
  private record: SessionRecord | null = null;
  private feed: Feed | null = null;
  private drawing: number | undefined;
  private chosen: string | null = null;
  private newestFirst = true;
  private isBehind = false;
  private hasEnded = false;

  constructor(
    private readonly shell: Shell,
    private readonly id: string,
  ) {
    this.lanes = new Lanes((stream) => this.choose(stream), () => void this.history());
    this.timeline = new Timeline(() => this.record?.facts.id ?? id, () => void this.earlier());
    replaceOnce(this.heading, 'Session ', short(id));
    this.body = h(
      'div',
      { hidden: true },
      this.facts,
      this.pending,
      this.steps.element,
      h('section', { 'aria-labelledby': 'streams-title' }, h('h2', { id: 'streams-title' }, 'Streams'), this.lanes.element),
      h(
        'section',
        { 'aria-labelledby': 'timeline-title' },
        h('div', { class: 'head' }, h('h2', { id: 'timeline-title' }, 'Timeline'), h('span', { class: 'buttons' }, this.all, this.order)),
        this.timeline.element,
      ),
    );
    this.element = h(
      'div',
      { class: 'session' },
      h('div', { class: 'head title' }, this.heading, this.state, h('span', { class: 'buttons' }, this.copy, this.end)),
      this.said,
      this.body,
    );
    this.loader = new Loader(
      (signal) => this.load(signal),
      (trouble) => this.onFailure(trouble),
    );
    this.follower = new Loader(
      async (signal) => this.take(await api.session(this.record?.facts.id ?? id, signal), now()),
      () => {},
    );
  }

  get title(): string {
    return `${this.record?.facts.kind ?? 'session'} ${short(this.id)}`;
  }

  show({ query }: Route): void {
    this.chosen = query.get('stream');
    this.newestFirst = query.get('order') !== 'oldest';
    if (this.record) this.draw();
    else this.loader.begin();
  }

  refresh(): void {}

  onTick(): void {
    if (this.record && !this.hasEnded && this.record.facts.calls.some((call) => UNENDED.has(call.state))) this.drawSoon();
  }

  pause(isHidden: boolean): void {
    if (isHidden) this.feed?.close();
    else if (!this.hasEnded) this.feed?.hurry();
  }

  close(): void {
    this.control.abort();
    this.loader.stop();
    this.follower.stop();
    this.feed?.close();
    clearTimeout(this.drawing);
  }

  // What comes from the console

  private async load(signal: AbortSignal): Promise<void> {
    const facts = await api.session(this.id, signal);
    this.take(facts, null);
    if (facts.state === 'ended') return this.finish(facts.ended ?? 'it is over');
    await this.history();
    if (signal.aborted || this.feed) return;
    const listener = { onSeen: (seen: Seen) => this.onSeen(seen), onOpen: () => this.onOpen(), onTrouble: (trouble: Trouble) => this.onFailure(trouble) };
    this.feed = new Feed(api.liveOf(facts.id), listener);
    this.feed.open();
  }

  private onFailure(trouble: Trouble): void {
    if (trouble.where !== 'gone' && trouble.where !== 'asked') {
      this.shell.onTrouble(trouble);
      if (!this.record) this.loader.soon();
      return;
    }
    this.feed?.close();
    this.hasEnded = true;
    this.tell(this.record ? 'It is no longer in the store. What was read of it before stays on this page.' : trouble.sentence);
    mark(this.state, 'data-is', 'still');
    this.end.hidden = true;
    this.copy.hidden = !this.record;
  }

  private onOpen(): void {
    this.isBehind = true;
  }

  private onSeen(seen: Seen): void {
    switch (seen.what) {
      case 'state':
        this.take(seen.session, now());
        if (this.isBehind) void this.history();
        this.isBehind = false;
        return;
      case 'opened':
        this.record?.open(seen);
        return this.drawSoon();
      case 'event':
      case 'gap':
        this.record?.add(seen);
        this.follower.soon();
        return this.drawSoon();
      case 'ended':
        return this.finish(seen.reason);
      case 'lost':
        return this.shell.onTrouble({ where: 'store', sentence: seen.error });
    }
  }

  private take(facts: Session, seen: number | null): void {
    if (facts.now !== undefined) setNow(facts.now);
    if (this.record) this.record.take(facts, seen);
    else this.record = new SessionRecord(facts);
    this.drawSoon();
  }

  private finish(reason: string): void {
    this.hasEnded = true;
    this.feed?.close();
    this.follower.stop();
    // The console tells it of a durable call as soon as its answer is there.
    const isOver = this.record?.facts.kind === 'session';
    if (this.record && isOver) {
      this.tell(`This session has ended: ${reason}. What was read of it before stays on this page.`);
      this.record.facts = { ...this.record.facts, state: 'ended', ended: reason };
    } else this.follower.begin();
    void this.history().then(() => this.drawSoon());
  }

  /** Load what is missing at the end of the streams that are shown. */
  private async history(): Promise<void> {
    const { record } = this;
    if (!record) return;
    const behind = this.lanes.shown(record, this.chosen).filter(({ facts, events }) => facts.last > (events.at(-1)?.seq ?? 0));
    await this.each(behind, async (stream) => {
      const known = stream.events.at(-1)?.seq ?? 0;
      await this.read(stream, Math.max(known, stream.facts.last - PAGE));
    });
  }

  /** Load the page before what is here, of the streams that are shown. */
  private async earlier(): Promise<void> {
    const { record } = this;
    if (!record) return;
    const behind = this.lanes.shown(record, this.chosen).filter((stream) => this.isShown(stream) && stream.hasEarlier);
    await this.each(behind, (stream) => this.read(stream, Math.max(0, stream.first - 1 - PAGE)));
  }

  private async read(stream: Stream, after: number): Promise<void> {
    const { signal } = this.control;
    const id = this.record?.facts.id ?? this.id;
    const { items } = await api.events(id, stream.id, after, PAGE, signal);
    for (const item of items) this.record?.add(item);
    const [first] = items;
    // A gap at the beginning of a page goes further back, perhaps.
    if (first?.what === 'gap' && first.first > 1) for (const item of (await api.events(id, stream.id, 0, 1, signal)).items) this.record?.add(item);
  }

  private async each(streams: Stream[], work: (stream: Stream) => Promise<void>): Promise<void> {
    const waiting = [...streams];
    const worker = async (): Promise<void> => {
      for (let stream = waiting.shift(); stream; stream = waiting.shift()) await work(stream);
    };
    try {
      await Promise.all(Array.from({ length: AT_ONCE }, worker));
    } catch {
      // The stream may be forgotten meanwhile; where the console is away, its feed tells and comes back here.
    }
    this.drawSoon();
  }

  // What the person does

  private choose(stream: string | null): void {
    this.go({ stream });
  }

  private turn(): void {
    this.go({ order: this.newestFirst ? 'oldest' : null });
  }

  private go(changes: Record<string, string | null>): void {
    const [path = '', query = ''] = location.hash.split('?', 2);
    const words = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) value === null ? words.delete(name) : words.set(name, value);
    location.hash = words.size ? `${path}?${words}` : path;
  }

  private ask(): void {
    if (this.record) askToEnd(this.record.facts, (text) => this.tell(text));
  }

  private async copyId(): Promise<void> {
    try {
      await navigator.clipboard.writeText(this.record?.facts.id ?? this.id);
      say(this.copy, 'Copied');
    } catch {
      say(this.copy, 'Not allowed here');
    }
    window.setTimeout(() => say(this.copy, 'Copy id'), 2_000);
  }

  private tell(text: string): void {
    this.said.hidden = false;
    replace(this.said, plain(text).replace(/[^.!?]$/, '$&.'), ' ', h('a', { href: '#/sessions' }, 'All sessions'));
  }

  // What is shown

  private isShown(stream: Stream): boolean {
    return this.chosen === null || stream.id === this.chosen;
  }

  private drawSoon(): void {
    this.drawing ??= window.setTimeout(() => this.draw(), DRAW);
  }

  private draw(): void {
    clearTimeout(this.drawing);
    this.drawing = undefined;
    const { record } = this;
    if (!record) return;
    const { facts } = record;
    this.body.hidden = false;
    const state = facts.state === 'ended' ? 'ended' : (facts.call ?? facts).state;
    replaceOnce(this.heading, `${facts.kind[0]?.toUpperCase()}${facts.kind.slice(1)} `, short(facts.id));
    say(this.state, state);
    mark(this.state, 'data-is', toneOf(state));
    this.end.hidden = !this.shell.facts?.allow_end || state === 'ended';
    fillFacts(this.facts, factsOf(facts));
    replace(this.pending, ...pendingOf(record));
    this.steps.draw(facts.calls.filter((call) => this.chosen === null || call.stream === this.chosen), now());
    this.lanes.draw(record, this.chosen);
    const only = (stream: Stream): boolean => this.isShown(stream);
    const earlier = this.lanes.shown(record, this.chosen).some((stream) => only(stream) && stream.hasEarlier && stream.events.length > 0);
    this.timeline.draw(record, { only, newestFirst: this.newestFirst, earlier });
    say(this.order, this.newestFirst ? 'Oldest first' : 'Newest first');
    this.all.hidden = this.chosen === null;
  }
}

function replaceOnce(heading: HTMLElement, word: string, id: string): void {
  if (heading.textContent !== word + id) replace(heading, word, h('code', {}, id));
}

function factsOf(session: Session): [string, string | Node][] {
  const { client, call } = session;
  const info = (client['clientInfo'] ?? {}) as Record<string, unknown>;
  const name = ['name', 'version'].map((key) => info[key]).filter((part) => typeof part === 'string');
  const isSession = session.kind === 'session';
  return [
    ['Owner', ownerOf(session)],
    ...(call ? ([['What', plain([call.method, call.name].filter(Boolean).join(' '))]] as [string, string][]) : []),
    ...(isSession ? ([['Client', plain(name.join(' ')) || NONE]] as [string, string][]) : []),
    ['Protocol', session.version || NONE],
    ['Created', ago(session.created, ' ago')],
    ['Last active', ago(session.active, ' ago')],
    [isSession ? 'Home' : 'Node', h('code', {}, short(call ? call.node : session.home))],
    ...(isSession ? ([['Incarnation', number(session.incarnation)]] as [string, string][]) : []),
    ...(isSession ? ([['Resume token', session.resume_token ? 'yes' : 'no']] as [string, string][]) : []),
    ...(session.ended ? ([['Ended', session.ended]] as [string, string][]) : []),
  ];
}

function fillFacts(list: HTMLElement, facts: [string, string | Node][]): void {
  const known = new Map([...list.children].map((entry) => [entry.firstElementChild?.textContent, entry]));
  const same = facts.length === list.children.length && facts.every(([name]) => known.has(name));
  if (!same) return replace(list, ...facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
  for (const [name, value] of facts) {
    const place = known.get(name)?.lastElementChild as HTMLElement;
    if (place.textContent !== (typeof value === 'string' ? value : value.textContent)) replace(place, value);
  }
}

/** Calls that have not ended, and what the server asks its client. */
function pendingOf({ facts: session, streams }: SessionRecord): HTMLElement[] {
  const calls = session.calls.filter((call) => UNENDED.has(call.state));
  const rows = calls.map((call) =>
    h(
      'li',
      {},
      h('span', { class: 'pill', 'data-is': toneOf(call.state) }, call.state),
      h('b', {}, plain(call.name ?? call.method)),
      h('span', { class: 'quiet' }, `request ${plain(String(call.request_id))}`),
      call.attempt > 1 ? h('span', { class: 'chip warn' }, `attempt ${call.attempt}`) : null,
      call.asks ? h('span', { class: 'chip warn' }, call.asks > 1 ? `asks ${call.asks} questions` : 'asks') : null,
      h('span', { class: 'quiet' }, streams.get(call.stream)?.progress ?? ''),
      h('span', { class: 'quiet' }, 'on node ', h('code', {}, short(call.node))),
      call.state === 'waiting' ? h('span', { class: 'quiet' }, 'its node died; it waits for its client to come back, or to be settled') : null,
    ),
  );
  const asks = session.asks.map((ask) => {
    const { title, detail } = summarize(ask.request);
    return h('li', {}, h('span', { class: 'pill', 'data-is': 'warn' }, 'waits for its client'), h('b', {}, title), h('span', { class: 'quiet' }, detail));
  });
  return calls.length || asks.length ? [h('ul', { class: 'open-calls', 'aria-label': 'Calls and questions that are open' }, ...rows, ...asks)] : [];
}
