// What the pages of the console have in common: their interface, their addresses, and loading with errors shown.
import type { StoreFacts, Tick } from './api.ts';
import { troubleOf, type Trouble } from './feed.ts';
import { ADDRESS_CHARACTERS } from './format.ts';
import type { Rates } from './rates.ts';

export interface Route {
  page: 'overview' | 'sessions' | 'session';
  id: string;
  query: URLSearchParams;
}

export function routeOf(hash: string): Route {
  const [path = '', query = ''] = hash.replace(/^#\/?/, '').split('?', 2);
  const [page, id = ''] = path.split('/');
  const rest = new URLSearchParams(query);
  if (page === 'session' && id) return { page, id: decode(id), query: rest };
  return { page: page === 'sessions' ? page : 'overview', id: '', query: rest };
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const linkTo = (id: string): string => `#/session/${encodeURIComponent(id.slice(0, ADDRESS_CHARACTERS))}`;

export interface Shell {
  readonly rates: Rates;
  readonly facts: StoreFacts | null;
  /** Show a trouble until the console ticks again. */
  onTrouble(trouble: Trouble): void;
  /** Load the store's facts again. */
  refreshFacts(): Promise<void>;
}

export interface View {
  readonly element: HTMLElement;
  readonly title: string;
  /** Show this address; also when only its query changes. */
  show(route: Route): void;
  /** Load again, because the lists have changed or the console is back. */
  refresh(): void;
  onTick(tick: Tick): void;
  /** Let go of connections while the page is hidden, and take them up again. */
  pause(isHidden: boolean): void;
  close(): void;
}

/** Milliseconds between two loads that nobody asked for, at least. */
const REST = 1_500;

/** A load costs the store something, so it rests for so many times as long as the last one took. */
const EASE = 6;

/** Loads something again and again: one load at a time, the last wish wins, and slow stores get rest. */
export class Loader {
  private control = new AbortController();
  private timer: number | undefined;
  private isWanted = false;
  private isBusy = false;
  private rest = 0;
  private ended = 0;

  constructor(
    private readonly load: (signal: AbortSignal) => Promise<void>,
    private readonly onFailure: (trouble: Trouble) => void,
  ) {}

  /** Now, whatever goes on: what was asked before is no longer wanted. */
  begin(): void {
    this.stop();
    void this.run();
  }

  /** Soon: not while one goes on, and not too often. */
  soon(): void {
    if (this.isBusy || this.timer !== undefined) {
      this.isWanted = this.isBusy;
      return;
    }
    const wait = Math.max(0, this.ended + this.rest - performance.now());
    this.timer = window.setTimeout(() => void this.run(), wait);
  }

  stop(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.control.abort();
    this.control = new AbortController();
    this.isBusy = this.isWanted = false;
  }

  private async run(): Promise<void> {
    this.timer = undefined;
    this.isBusy = true;
    this.isWanted = false;
    const { signal } = this.control;
    const begun = performance.now();
    try {
      await this.load(signal);
    } catch (error) {
      if (!signal.aborted) this.onFailure(troubleOf(error));
    }
    if (signal.aborted) return;
    this.isBusy = false;
    this.ended = performance.now();
    this.rest = Math.max(REST, (this.ended - begun) * EASE);
    if (this.isWanted) this.soon();
  }
}
