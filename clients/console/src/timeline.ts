// The timeline of a session as a list: one row for each event, gap, re-run and reader, payloads folded.
import { api, type LogEvent } from './api.ts';
import { arrange, h, mark, replace, say } from './dom.ts';
import { bytes, clock, lines, number, plain, plural, short } from './format.ts';
import { summarize } from './messages.ts';
import type { Row, SessionRecord, Stream } from './record.ts';

/** Rows that are in the page at once, and that the button adds. */
const ROWS = 200;

/** Characters of a payload that are laid out: a browser takes seconds for megabytes. */
const MOST_CHARACTERS = 400_000;

export class Timeline {
  readonly element: HTMLElement;
  private readonly list = h('ol', { class: 'timeline' });
  private readonly none = h('p', { class: 'none' }, 'No event is kept here.');
  private readonly more = h('button', { type: 'button', class: 'plain', hidden: true, click: () => this.showMore() });
  private readonly rows = new Map<string, HTMLLIElement>();
  private limit = ROWS;

  constructor(
    private readonly session: () => string,
    private readonly onMore: () => void,
  ) {
    this.element = h('div', { class: 'timeline-box' }, this.list, this.none, this.more);
  }

  /** `earlier` says that events are in the store that are older than these. */
  draw(record: SessionRecord, { only, newestFirst, earlier }: { only: (stream: Stream) => boolean; newestFirst: boolean; earlier: boolean }): void {
    const all = record.rows(only);
    const shown = all.slice(-this.limit);
    const keys = new Set(shown.map((row) => row.key));
    for (const key of this.rows.keys()) if (!keys.has(key)) this.rows.delete(key);
    const elements = shown.map((row) => this.elementOf(row, record.streams.get(row.stream) as Stream));
    if (newestFirst) elements.reverse();
    arrange(this.list, elements);
    this.markReaders(record);
    this.none.hidden = shown.length > 0;
    this.more.hidden = !earlier && all.length <= this.limit;
    say(this.more, 'Show earlier events');
    const before = newestFirst ? this.more : this.list;
    if (this.element.lastElementChild !== before) newestFirst ? this.element.append(this.more) : this.element.prepend(this.more);
  }

  private showMore(): void {
    this.limit += ROWS;
    this.onMore();
  }

  private elementOf(row: Row, stream: Stream): HTMLLIElement {
    let element = this.rows.get(row.key);
    if (!element) {
      element = row.is === 'event' ? this.event(row.event, stream) : note(row, stream);
      this.rows.set(row.key, element);
    }
    const name = element.querySelector('.of');
    if (name) say(name, plain(stream.title) || stream.facts.kind);
    if (row.is !== 'event') renew(element, row);
    return element;
  }

  private markReaders(record: SessionRecord): void {
    for (const chip of this.list.querySelectorAll('.here')) chip.remove();
    for (const stream of record.streams.values()) {
      const row = this.rows.get(`${stream.id} ${stream.readTo}`);
      row?.querySelector('.said')?.after(h('span', { class: 'chip here', title: 'as far as readers have got, as far as that was written' }, 'read to here'));
    }
  }

  private event(event: LogEvent, stream: Stream): HTMLLIElement {
    const { is, title, detail, share } = summarize(event.message, event);
    const summary = h(
      'summary',
      {},
      ...place(event.time, stream),
      h('span', { class: 'seq', title: 'number in its stream' }, number(event.seq)),
      h('span', { class: 'said' }, h('b', {}, title), detail && ' ', detail && h('span', { class: 'detail' }, detail)),
      share === undefined ? null : h('progress', { max: '1', value: share, 'aria-label': title }),
    );
    const details = h('details', {}, summary);
    details.addEventListener('toggle', () => details.open && details.children.length === 1 && details.append(this.payload(event, stream)));
    return h('li', { 'data-is': is, 'data-final': event.final }, details);
  }

  private payload(event: LogEvent, stream: Stream): HTMLElement {
    const text = h('pre', { tabindex: '0', 'aria-label': 'payload' }, pretty(event.message));
    const about = h(
      'p',
      { class: 'about' },
      h('span', {}, 'position ', h('code', {}, stream.position(event.seq))),
      event.bytes === undefined ? null : h('span', {}, bytes(event.bytes)),
      event.final ? h('span', {}, 'the answer: it seals the stream') : null,
    );
    const box = h('div', { class: 'payload' }, about, text);
    if (event.cut) {
      const whole = h('button', { type: 'button', click: () => void this.whole(event, text, whole) }, `Load all ${bytes(event.bytes)}`);
      about.append(whole);
    }
    return box;
  }

  private async whole(event: LogEvent, text: HTMLElement, button: HTMLButtonElement): Promise<void> {
    button.disabled = true;
    try {
      replace(text, pretty((await api.event(this.session(), event.stream, event.seq)).message));
      button.remove();
    } catch (error) {
      button.disabled = false;
      say(button, `${error instanceof Error ? error.message : String(error)} Try again`);
    }
  }
}

function pretty(message: unknown): string {
  const text = typeof message === 'string' ? message : JSON.stringify(message, null, 2);
  const cut = text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}\n… ${plural(text.length - MOST_CHARACTERS, 'character')} more` : text;
  return lines(cut);
}

function place(time: number, stream: Stream): HTMLElement[] {
  return [
    h('time', { datetime: new Date(time * 1000).toISOString() }, clock(time)),
    h('span', { class: 'stream' }, h('code', {}, short(stream.id)), h('span', { class: 'of' })),
  ];
}

function textOf(row: Exclude<Row, { is: 'event' }>): string {
  if (row.is !== 'gap') return row.text;
  const { first, last } = row;
  return `gap: ${first === last ? `event ${first} is` : `events ${number(first)} to ${number(last)} are`} no longer there`;
}

function note(row: Exclude<Row, { is: 'event' }>, stream: Stream): HTMLLIElement {
  return h('li', {}, h('div', { class: 'note' }, ...place(row.time, stream), h('span', { class: 'seq' }), h('span', { class: 'said' })));
}

/** What is between events says more when more of them are known. */
function renew(element: HTMLElement, row: Exclude<Row, { is: 'event' }>): void {
  const time = element.querySelector('time') as HTMLTimeElement;
  say(time, clock(row.time));
  time.dateTime = new Date(row.time * 1000).toISOString();
  say(element.querySelector('.said') as Element, textOf(row));
  mark(element, 'data-is', row.is);
}
