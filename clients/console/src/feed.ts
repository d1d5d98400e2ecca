// Follows one address of server-sent events, and comes back by itself when it breaks.
import { Refused, type Seen } from './api.ts';

/** Milliseconds to the next attempt: soon at first, because a console that is started again is back in a second or two. */
const FIRST_WAIT = 500;
const LONGEST_WAIT = 8_000;

/** Milliseconds without a message after which a connection counts as dead; a tick comes each second. */
export const SILENCE = 15_000;

export interface Trouble {
  /**
   * `console`: it does not answer. `store`: it cannot read the store. `token`: it does not know this page. `gone`: what was
   * asked for is not there. `asked`: it does not take what was asked.
   */
  where: 'console' | 'store' | 'token' | 'gone' | 'asked';
  sentence: string;
}

export interface Listener {
  onSeen(seen: Seen): void;
  /** The connection is there, and was not before. */
  onOpen(): void;
  onTrouble(trouble: Trouble): void;
}

const PLACES: Readonly<Record<number, Trouble['where']>> = {
  400: 'asked',
  401: 'token',
  403: 'token',
  404: 'gone',
  421: 'token',
  503: 'store',
};

export function troubleOf(error: unknown): Trouble {
  if (!(error instanceof Refused)) return { where: 'console', sentence: String(error) };
  return { where: PLACES[error.status] ?? 'console', sentence: error.message };
}

export class Feed {
  private source: EventSource | null = null;
  private timer: number | undefined;
  private wait = FIRST_WAIT;
  private heard = 0;
  /** Rises with each opening and closing, so that what was asked before them is not acted on. */
  private turn = 0;

  /**
   * `ask` is a request that tells why the feed broke, because the browser does not. `silence`: milliseconds without a message
   * after which to connect again; 0 where messages may be rare.
   */
  constructor(
    private readonly address: string,
    private readonly listener: Listener,
    private readonly ask: () => Promise<unknown>,
    private readonly silence = 0,
  ) {}

  open(): void {
    this.close();
    const source = new EventSource(this.address);
    this.source = source;
    this.heard = performance.now();
    source.onopen = () => {
      this.wait = FIRST_WAIT;
      this.listener.onOpen();
    };
    source.onmessage = ({ data }) => {
      this.heard = performance.now();
      this.listener.onSeen(JSON.parse(data) as Seen);
    };
    source.onerror = () => void this.recover();
    if (this.silence) this.timer = window.setInterval(() => this.listen(), this.silence / 3);
  }

  close(): void {
    this.turn += 1;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** Do not wait for the next attempt. */
  hurry(): void {
    this.wait = FIRST_WAIT;
    this.open();
  }

  private listen(): void {
    if (performance.now() - this.heard > this.silence) void this.recover();
  }

  private async recover(): Promise<void> {
    this.close();
    const turn = this.turn;
    let trouble: Trouble = { where: 'console', sentence: 'The connection was lost.' };
    try {
      await this.ask();
    } catch (error) {
      trouble = troubleOf(error);
    }
    if (turn !== this.turn) return;
    this.listener.onTrouble(trouble);
    this.timer = window.setTimeout(() => this.open(), this.wait * (0.75 + Math.random() / 2));
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
  }
}
