// Small plots of the last minutes: lines without axes, with the figures as text beside them.
import { h, mark, replace, say, svg } from './dom.ts';
import { clock } from './format.ts';

/** Points that a plot shows: three minutes of one each second; and the room that it has from the beginning. */
export const POINTS = 180;
const LEAST = 60;

const HEIGHT = 40;

export interface Point {
  time: number;
  values: (number | null)[];
}

export class Plot {
  readonly element: HTMLElement;
  private readonly figures: HTMLElement;
  private readonly caption: HTMLElement;
  private readonly note = h('p', { class: 'note' });
  private readonly chart = svg('svg', { preserveAspectRatio: 'none', role: 'img' });
  private points: readonly Point[] = [];
  private at: number | null = null;

  private get width(): number {
    return Math.max(LEAST, this.points.length);
  }

  /** `names` are those of the lines; the first one is the chief one. */
  constructor(
    private title: string,
    private readonly names: readonly string[],
    private readonly write: (value: number) => string,
  ) {
    this.figures = h('dl', { class: 'figures' });
    this.caption = h('figcaption', {}, title);
    this.element = h('figure', { class: 'plot' }, this.caption, this.figures, this.chart, this.note);
    this.chart.addEventListener('pointermove', (event) => this.point(event));
    this.chart.addEventListener('pointerleave', () => this.leave());
  }

  rename(title: string): void {
    this.title = title;
    say(this.caption, title);
  }

  draw(points: readonly Point[]): void {
    this.points = points.slice(-POINTS);
    const known = this.points.flatMap(({ values }) => values.filter((value): value is number => value !== null));
    const top = Math.max(...known, 0);
    mark(this.chart, 'viewBox', `0 0 ${this.width} ${HEIGHT}`);
    replace(
      this.chart,
      svg('path', { class: 'floor', d: `M0 ${HEIGHT - 0.5}H${this.width}` }),
      ...this.names.map((_, line) => svg('path', { class: `line line-${line}`, d: this.path(line, top || 1) })),
      this.at === null ? null : svg('path', { class: 'cursor', d: `M${this.width - this.points.length + this.at + 0.5} 0V${HEIGHT}` }),
    );
    this.tell(top, known.length > 0);
  }

  private path(line: number, top: number): string {
    let pen = 'M';
    let path = '';
    this.points.forEach(({ values }, index) => {
      const value = values[line];
      if (value === null || value === undefined) return void (pen = 'M');
      const x = this.width - this.points.length + index + 0.5;
      path += `${pen}${x} ${(HEIGHT - 1.5 - (value / top) * (HEIGHT - 4)).toFixed(2)}`;
      pen = 'L';
    });
    return path;
  }

  private tell(top: number, isKnown: boolean): void {
    const shown = this.points[this.at ?? this.points.length - 1];
    const words = this.names.map((name, line) => {
      const value = shown?.values[line];
      return [name, value === null || value === undefined ? '–' : this.write(value)] as const;
    });
    if (this.figures.children.length !== words.length)
      replace(this.figures, ...words.map(([name], line) => h('div', { class: `line-${line}` }, h('dt', {}, name), h('dd', {}))));
    words.forEach(([, text], line) => say(this.figures.children[line]?.lastElementChild as Element, text));
    const minutes = `${Math.max(1, Math.round(this.points.length / 60))} min`;
    const most = isKnown ? `at most ${this.write(top)} in ${minutes}` : 'nothing yet';
    say(this.note, this.at !== null && shown ? `at ${clock(shown.time).slice(0, 8)}` : most);
    mark(this.chart, 'aria-label', `${this.title}: ${words.map(([name, text]) => `${name} ${text}`).join(', ')}; ${most}`);
  }

  private point(event: PointerEvent): void {
    const box = this.chart.getBoundingClientRect();
    const index = Math.floor(((event.clientX - box.left) / box.width) * this.width) - (this.width - this.points.length);
    this.at = index >= 0 && index < this.points.length ? index : null;
    this.draw(this.points);
  }

  private leave(): void {
    this.at = null;
    this.draw(this.points);
  }
}
