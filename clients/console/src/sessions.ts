// The page of all sessions, tasks and calls: filters, search by an id's beginning, and paging.
import { api } from './api.ts';
import { h, mark, say } from './dom.ts';
import { number, plain } from './format.ts';
import { SessionTable } from './table.ts';
import { now, setNow } from './times.ts';
import { Loader, type Route, type Shell, type View } from './view.ts';

const PAGE = 100;

/** Milliseconds after the last letter until a search begins. */
const TYPING = 250;

const STATES: readonly [string, readonly string[]][] = [
  ['of sessions', ['opening', 'active', 'dormant', 'ended']],
  ['of calls', ['running', 'waiting', 'answered', 'cancelled', 'settled']],
];

const AGES: readonly [string, string][] = [
  ['', 'at any time'],
  ['60', 'in the last minute'],
  ['600', 'in the last 10 minutes'],
  ['3600', 'in the last hour'],
  ['86400', 'in the last day'],
  ['-3600', 'not for an hour'],
  ['-86400', 'not for a day'],
  ['-604800', 'not for a week'],
];

const FILTERS = ['q', 'kind', 'state', 'owner', 'tool', 'active'] as const;

export class Sessions implements View {
  readonly title = 'Sessions';
  readonly element: HTMLElement;
  private readonly form: HTMLFormElement;
  private readonly table = new SessionTable('Sessions, tasks and calls, the last active one first');
  private readonly more = h('button', { type: 'button', class: 'newer', hidden: true, click: () => this.showNewer() });
  private readonly sum = h('p', { class: 'sum', 'aria-live': 'off' });
  private readonly first = h('a', { class: 'button', href: '#/sessions' }, 'First page');
  private readonly previous = h('a', { class: 'button' }, 'Previous page');
  private readonly next = h('a', { class: 'button' }, 'Next page');
  private readonly loader: Loader;
  private query = new URLSearchParams();
  private isFresh = true;
  private typing: number | undefined;

  constructor(shell: Shell) {
    this.form = filters();
    this.form.addEventListener('change', () => this.filter(true));
    this.form.addEventListener('input', (event) => (event.target as Element).matches('input') && this.type());
    this.form.addEventListener('submit', (event) => (event.preventDefault(), this.filter(true)));
    this.form.addEventListener('reset', () => window.setTimeout(() => this.filter(true)));
    this.element = h(
      'div',
      { class: 'list' },
      h('h1', { tabindex: '-1' }, 'Sessions, tasks and calls'),
      this.form,
      h('div', { class: 'head' }, this.sum, this.more),
      this.table.element,
      h('nav', { class: 'paging', 'aria-label': 'Pages of the list' }, this.first, this.previous, this.next),
    );
    this.loader = new Loader(
      (signal) => this.load(signal),
      (trouble) => (trouble.where === 'asked' ? this.refuse(trouble.sentence) : shell.onTrouble(trouble)),
    );
  }

  show({ query }: Route): void {
    this.query = query;
    for (const name of FILTERS) {
      const field = this.form.elements.namedItem(name) as HTMLInputElement | HTMLSelectElement;
      if (field !== document.activeElement || field instanceof HTMLSelectElement) field.value = query.get(name) ?? '';
    }
    this.isFresh = true;
    this.loader.begin();
  }

  refresh(): void {
    this.loader.soon();
  }

  onTick(): void {}

  pause(): void {}

  close(): void {
    clearTimeout(this.typing);
    this.loader.stop();
  }

  private showNewer(): void {
    this.isFresh = true;
    this.loader.begin();
    (this.element.querySelector('tbody a') as HTMLElement | null)?.focus();
  }

  private type(): void {
    clearTimeout(this.typing);
    this.typing = window.setTimeout(() => this.filter(false), TYPING);
  }

  /** Put the form into the address; what was typed letter by letter is one step of the history. */
  private filter(isStep: boolean): void {
    clearTimeout(this.typing);
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(this.form)) {
      const text = String(value).trim();
      if (text) query.set(name, text);
    }
    const hash = addressOf(query);
    if (hash === location.hash || (hash === '#/sessions' && !this.query.size)) return;
    if (isStep) location.hash = hash;
    else {
      history.replaceState(null, '', hash);
      this.show({ page: 'sessions', id: '', query });
    }
  }

  private asked(): URLSearchParams {
    const query = new URLSearchParams({ limit: `${PAGE}` });
    for (const name of ['q', 'kind', 'state', 'owner', 'tool', 'offset']) {
      const value = this.query.get(name);
      if (value) query.set(name, value);
    }
    const active = Number(this.query.get('active') ?? 0);
    if (active > 0) query.set('active_after', `${now() - active}`);
    if (active < 0) query.set('active_before', `${now() + active}`);
    return query;
  }

  private async load(signal: AbortSignal): Promise<void> {
    const page = await api.sessions(this.asked(), signal);
    setNow(page.now);
    const isFiltered = FILTERS.some((name) => this.query.get(name));
    const none = isFiltered ? 'Nothing fits these filters.' : 'No session, task or call is in this store yet.';
    const hidden = this.table.fill(page.items, { holds: !this.isFresh && this.table.isUsed, none });
    // Told aloud if the person has asked for it, and not whenever something happens in the store.
    mark(this.sum, 'aria-live', this.isFresh ? 'polite' : 'off');
    this.isFresh = false;
    this.more.hidden = !hidden;
    say(this.more, `Show ${number(hidden)} newer`);
    this.turn(page.items.length, page.next, page.total, page.left_out);
  }

  private refuse(sentence: string): void {
    this.table.fill([], { holds: false, none: plain(sentence) });
    this.turn(0, null, null, false);
  }

  private turn(shown: number, next: number | null, total: number | null, isPart: boolean): void {
    const before = Number(this.query.get('offset') ?? 0) || 0;
    const range = shown ? `${number(before + 1)} to ${number(before + shown)}` : '0';
    say(this.sum, total === null ? range : `${range} of ${number(total)}${isPart ? ', the last active ones' : ''}`);
    this.first.hidden = this.previous.hidden = !before;
    this.next.hidden = next === null;
    this.first.href = this.at(0);
    this.previous.href = this.at(before - PAGE);
    this.next.href = this.at(next ?? 0);
  }

  /** The address of the page that begins with an entry of the list. */
  private at(offset: number): string {
    const query = new URLSearchParams(this.query);
    query.delete('offset');
    if (offset > 0) query.set('offset', `${offset}`);
    return addressOf(query);
  }
}

const addressOf = (query: URLSearchParams): string => (query.size ? `#/sessions?${query}` : '#/sessions');

function filters(): HTMLFormElement {
  const field = (label: string, control: HTMLElement): HTMLElement => h('label', {}, h('span', {}, label), control);
  const text = (name: string, hint: string): HTMLInputElement =>
    h('input', { name, type: 'search', autocomplete: 'off', spellcheck: 'false', autocapitalize: 'off', placeholder: hint });
  const option = (value: string, name = value): HTMLElement => h('option', { value }, name);
  return h(
    'form',
    { class: 'filters', role: 'search', 'aria-label': 'Filter the list' },
    field('Id begins with', text('q', 'any')),
    field('Kind', h('select', { name: 'kind' }, option('', 'all'), option('session'), option('task'), option('call'))),
    field(
      'State',
      h('select', { name: 'state' }, option('', 'all'), ...STATES.map(([label, names]) => h('optgroup', { label }, ...names.map((name) => option(name))))),
    ),
    field('Owner', text('owner', 'any')),
    field('Tool of a running call', text('tool', 'any')),
    field('Active', h('select', { name: 'active' }, ...AGES.map(([value, name]) => option(value, name)))),
    h('button', { type: 'reset' }, 'Clear'),
  );
}
