// The steps of the tools of a session's calls: name, kind, state, begin, duration and run. Their values are not shown.
import type { CallRow, ToolStep } from './api.ts';
import { h, replace } from './dom.ts';
import { clock, duration, NONE, number, plain, plural } from './format.ts';

/** Rows that are in the page at once, the newest: a call may have a thousand. */
const ROWS = 100;

const TONES: Readonly<Record<string, string>> = { ended: 'good', failed: 'bad', open: 'busy' };

const HEADS = ['Step', 'Call', 'Kind', 'State', 'Began', 'Takes', 'Run'];

export class StepTable {
  readonly element: HTMLElement;
  private readonly body = h('tbody', {});
  private readonly more = h('p', { class: 'quiet' });
  private shown = '';

  constructor() {
    const heads = HEADS.map((name) => h('th', { scope: 'col' }, name));
    const table = h('table', { class: 'steps cards' }, h('thead', {}, h('tr', {}, ...heads)), this.body);
    this.element = h('section', { hidden: true, 'aria-labelledby': 'steps-title' }, h('h2', { id: 'steps-title' }, 'Steps of tools'), table, this.more);
  }

  draw(calls: readonly CallRow[], now: number): void {
    const all = calls.flatMap((call) => call.steps.map((step) => ({ call, step, state: stateOf(step, now) })));
    const rows = all.slice(-ROWS);
    const shown = JSON.stringify([all.length, rows.map(({ call, step, state }) => [call.stream, call.request_id, step, state])]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.element.hidden = !all.length;
    this.more.hidden = all.length === rows.length;
    replace(this.more, `${plural(all.length - rows.length, 'older step')} not shown`);
    replace(this.body, ...rows.map(({ call, step, state }) => rowOf(call, step, state)));
  }
}

/** A sleep is recorded with its end, which may lie in the future. */
function stateOf({ kind, state, ended }: ToolStep, now: number): string {
  return kind === 'sleep' && ended !== null && ended > now ? `sleeps until ${clock(ended).slice(0, 8)}` : state;
}

function rowOf(call: CallRow, step: ToolStep, state: string): HTMLTableRowElement {
  const cells = [
    [plain(step.name)],
    [plain(call.name ?? call.method), h('span', { class: 'quiet' }, ` request ${plain(String(call.request_id))}`)],
    [step.kind],
    [h('span', { class: 'pill', 'data-is': state === step.state ? (TONES[state] ?? 'still') : 'warn' }, state)],
    [h('time', { datetime: new Date(step.began * 1000).toISOString() }, clock(step.began))],
    [step.ended === null ? NONE : duration(Math.max(step.ended - step.began, 0))],
    [number(step.attempt)],
  ];
  return h(
    'tr',
    {},
    ...cells.map((content, at) => h(at ? 'td' : 'th', { scope: at ? null : 'row', 'data-head': HEADS[at] }, ...content)),
  );
}
