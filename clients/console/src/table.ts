// The table of sessions, tasks and calls. Its rows stay where they are while somebody reads or uses it.
import type { Listed } from './api.ts';
import { arrange, h, mark, say } from './dom.ts';
import { NONE, number, plain, short } from './format.ts';
import { ago, setAgo } from './times.ts';
import { linkTo } from './view.ts';

const HEADS: readonly [string, string][] = [
  ['Id', 'id'],
  ['Kind', 'kind'],
  ['Tool', 'tool'],
  ['Owner', 'owner'],
  ['State', 'state'],
  ['Protocol', 'version'],
  ['Age', 'age number'],
  ['Last active', 'active number'],
  ['Running', 'calls number'],
  ['Streams', 'streams number'],
  ['Node', 'node'],
];

const TONES: Readonly<Record<string, string>> = {
  active: 'good',
  answered: 'good',
  running: 'busy',
  waiting: 'warn',
  opening: 'busy',
  settled: 'bad',
};

export const toneOf = (state: string): string => TONES[state] ?? 'still';

export const ownerOf = ({ owner, owner_name }: Pick<Listed, 'owner' | 'owner_name'>): string => plain(owner_name ?? owner) || NONE;

export class SessionTable {
  readonly element: HTMLElement;
  private readonly body = h('tbody', {});
  private readonly none = h('p', { class: 'none' }, 'Reading the store…');
  private readonly table: HTMLTableElement;
  private readonly rows = new Map<string, Row>();

  constructor(caption: string) {
    const heads = HEADS.map(([name, of]) => h('th', { scope: 'col', class: of }, name));
    this.table = h('table', { class: 'sessions cards', hidden: true }, h('caption', { class: 'unseen' }, caption), h('thead', {}, h('tr', {}, ...heads)), this.body);
    this.element = h('div', { class: 'table' }, this.table, this.none);
  }

  /** Whether somebody points at it or has the focus in it. */
  get isUsed(): boolean {
    return this.body.matches(':hover') || this.body.contains(document.activeElement);
  }

  /**
   * Show these. `holds` keeps the rows that are shown in their places, and says how many are not shown for that; a row that is
   * no longer among these is dimmed.
   */
  fill(items: readonly Listed[], { holds, none = 'Nothing is here yet.' }: { holds: boolean; none?: string }): number {
    const wanted = new Set(items.map((item) => item.id));
    const isHeld = holds && this.rows.size > 0;
    for (const item of items) {
      const row = this.rows.get(item.id);
      if (row) row.fill(item);
      else if (!isHeld) this.rows.set(item.id, new Row(item));
    }
    if (isHeld) {
      for (const [id, row] of this.rows) mark(row.element, 'data-gone', wanted.has(id) ? null : '');
      return items.filter((item) => !this.rows.has(item.id)).length;
    }
    for (const id of this.rows.keys()) if (!wanted.has(id)) this.rows.delete(id);
    arrange(
      this.body,
      items.map((item) => (this.rows.get(item.id) as Row).element),
    );
    for (const row of this.rows.values()) mark(row.element, 'data-gone', null);
    this.table.hidden = !items.length;
    this.none.hidden = items.length > 0;
    say(this.none, none);
    return 0;
  }
}

class Row {
  readonly element: HTMLTableRowElement;
  private readonly state = h('span', { class: 'pill' });
  private readonly cells: Readonly<Record<'tool' | 'attempt' | 'calls' | 'streams' | 'node', HTMLElement>>;
  private readonly active: HTMLTimeElement;

  constructor(item: Listed) {
    this.cells = {
      tool: h('span', {}),
      attempt: h('span', { class: 'chip warn' }),
      calls: h('span', {}),
      streams: h('span', {}),
      node: h('code', {}),
    };
    this.active = ago(item.active);
    const contents: Record<string, (Node | string)[]> = {
      id: [h('a', { href: linkTo(item.id) }, h('code', {}, short(item.id)))],
      kind: [item.kind],
      tool: [this.cells.tool, ' ', this.cells.attempt],
      version: [item.version || NONE],
      owner: [ownerOf(item)],
      state: [this.state],
      age: [ago(item.created)],
      active: [this.active],
      calls: [this.cells.calls],
      streams: [this.cells.streams],
      node: [this.cells.node],
    };
    this.element = h(
      'tr',
      {},
      ...HEADS.map(([name, of]) => {
        const key = of.split(' ')[0] as string;
        return h(key === 'id' ? 'th' : 'td', { class: of, 'data-head': name, scope: key === 'id' ? 'row' : null }, ...(contents[key] ?? []));
      }),
    );
    this.fill(item);
  }

  fill(item: Listed): void {
    const { call } = item;
    const state = (call ?? item).state;
    say(this.state, state);
    mark(this.state, 'data-is', toneOf(state));
    setAgo(this.active, item.active);
    say(this.cells.tool, call ? plain(call.name ?? call.method) : NONE);
    this.cells.attempt.hidden = !call || call.attempt < 2;
    say(this.cells.attempt, call ? `attempt ${call.attempt}` : '');
    say(this.cells.calls, number(item.calls));
    say(this.cells.streams, number(item.streams));
    say(this.cells.node, short(call ? call.node : item.home));
  }
}
