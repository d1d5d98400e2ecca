// The first page: how the store is, what happens in it, which nodes serve it, and what was active last.
import { api, type NodeFacts, type StoreFacts, type Tick } from './api.ts';
import { arrange, h, mark, replace, say } from './dom.ts';
import { bytes, duration, figure, NONE, number, plain, short } from './format.ts';
import { Plot } from './plots.ts';
import { SessionTable } from './table.ts';
import { ago, setNow } from './times.ts';
import { Loader, type Shell, type View } from './view.ts';

/** Sessions that the first page shows: what fits below the rest of it. */
const LATEST = 10;

/** Milliseconds after which the figures are read again although no list has changed: the console measures the store as often. */
const STALE = 15_000;

export class Overview implements View {
  readonly title = 'Overview';
  readonly element: HTMLElement;
  private readonly health = h('dl', { class: 'facts' });
  private readonly problems = h('ul', { class: 'problems', hidden: true });
  private readonly nodes = new NodeTable();
  private readonly table = new SessionTable('The sessions, tasks and calls that were active last');
  private readonly plots: readonly [Plot, Plot, Plot, Plot];
  private readonly loader: Loader;
  private loaded = 0;

  constructor(private readonly shell: Shell) {
    this.plots = [
      new Plot('Events per second', ['now'], figure),
      new Plot('Calls per second', ['begun', 'ended'], figure),
      new Plot('Running calls', ['now'], figure),
      new Plot('Latency of calls', ['median', 'p99'], duration),
    ];
    this.element = h(
      'div',
      { class: 'overview' },
      h('h1', { class: 'unseen', tabindex: '-1' }, 'Overview'),
      h('section', { class: 'health', 'aria-label': 'Store' }, this.health, this.problems),
      h('section', { class: 'plots', 'aria-label': 'Rates' }, ...this.plots.map((plot) => plot.element)),
      h('section', { 'aria-labelledby': 'nodes-title' }, h('h2', { id: 'nodes-title' }, 'Nodes'), this.nodes.element),
      h(
        'section',
        { 'aria-labelledby': 'latest-title' },
        h('div', { class: 'head' }, h('h2', { id: 'latest-title' }, 'Active last'), h('a', { href: '#/sessions' }, 'All sessions')),
        this.table.element,
      ),
    );
    this.loader = new Loader(
      (signal) => this.load(signal),
      (trouble) => shell.onTrouble(trouble),
    );
  }

  show(): void {
    this.draw();
    this.loader.begin();
  }

  refresh(): void {
    this.loader.soon();
  }

  onTick({ latency }: Tick): void {
    if (latency) this.plots[3].rename(latency.of === 'append' ? 'Latency of writes' : 'Latency of calls');
    this.draw();
    if (performance.now() - this.loaded > STALE) this.loader.soon();
  }

  pause(): void {}

  close(): void {
    this.loader.stop();
  }

  private draw(): void {
    const { events, calls, running, latency } = this.shell.rates;
    [events, calls, running, latency].forEach((points, index) => this.plots[index]?.draw(points));
  }

  private async load(signal: AbortSignal): Promise<void> {
    const [, nodes, latest] = await Promise.all([
      this.shell.refreshFacts(),
      api.nodes(signal),
      api.sessions(new URLSearchParams({ limit: `${LATEST}` }), signal),
    ]);
    this.loaded = performance.now();
    setNow(latest.now);
    this.nodes.fill(nodes.nodes);
    this.table.fill(latest.items, { holds: false });
    if (this.shell.facts) this.tell(this.shell.facts);
  }

  private tell(facts: StoreFacts): void {
    const { counts } = facts;
    const state = facts.degraded === null ? ['unknown', 'unknown'] : facts.degraded ? ['degraded', 'bad'] : ['healthy', 'good'];
    const entries: [string, Node | string][] = [
      ['Store', h('span', { class: 'pill', 'data-is': state[1] }, state[0])],
      ['Sessions', number(counts.sessions)],
      ['Tasks and calls', number(counts.calls)],
      ['Running', number(counts.running)],
      ['Events kept', number(facts.events)],
      ['Size', bytes(facts.size_bytes)],
      ['Oldest', facts.oldest === null ? NONE : ago(facts.oldest)],
    ];
    replace(this.health, ...entries.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
    replace(this.problems, ...facts.problems.map((problem) => h('li', {}, plain(problem))));
    this.problems.hidden = !facts.problems.length;
  }
}

const NODE_TONES: Readonly<Record<string, string>> = { alive: 'good', dead: 'bad' };
const NODE_HEADS = ['Node', 'State', 'Age', 'Calls', 'Streams', 'Readers'];

class NodeTable {
  private readonly body = h('tbody', {});
  private readonly none = h('p', { class: 'none', hidden: true }, 'No server uses this store now. Start one: ', h('code', {}, 'perdure serve'));
  private readonly table = h(
    'table',
    { class: 'nodes cards', hidden: true },
    h('caption', { class: 'unseen' }, 'Nodes that have joined the store'),
    h('thead', {}, h('tr', {}, ...NODE_HEADS.map((name, index) => h('th', { scope: 'col', class: index > 1 ? 'number' : null }, name)))),
    this.body,
  );
  readonly element = h('div', {}, this.table, this.none);
  private readonly rows = new Map<string, HTMLTableRowElement>();

  fill(nodes: readonly NodeFacts[]): void {
    this.table.hidden = !nodes.length;
    this.none.hidden = nodes.length > 0;
    const ids = new Set(nodes.map((node) => node.id));
    for (const id of this.rows.keys()) if (!ids.has(id)) this.rows.delete(id);
    arrange(
      this.body,
      nodes.map((node) => this.row(node)),
    );
  }

  private row(node: NodeFacts): HTMLTableRowElement {
    let row = this.rows.get(node.id);
    if (!row) {
      const age = node.since === null ? NONE : ago(node.since);
      row = h(
        'tr',
        {},
        h('th', { scope: 'row', 'data-head': NODE_HEADS[0] }, h('code', {}, short(node.id))),
        h('td', { 'data-head': NODE_HEADS[1] }, h('span', { class: 'pill' })),
        ...NODE_HEADS.slice(2).map((name, index) => h('td', { class: 'number', 'data-head': name }, index === 0 ? age : null)),
      );
      this.rows.set(node.id, row);
    }
    const pill = row.querySelector('.pill') as Element;
    const { state } = node;
    say(pill, node.degraded && node.alive ? 'degraded' : state);
    mark(pill, 'data-is', node.degraded && node.alive ? 'warn' : (NODE_TONES[state] ?? 'still'));
    mark(row, 'data-gone', state === 'left' || state === 'gone' ? '' : null);
    [node.calls, node.streams, node.readers].forEach((value, index) => say(row.cells[index + 3] as Element, number(value)));
    return row;
  }
}
