// Follows one address of server-sent events, and comes back by itself when it breaks.
import { decoder } from '../../browser/src/sse.ts';
import { ask, Refused, type Seen } from './api.ts';

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

const LOST: Trouble = { where: 'console', sentence: 'The connection was lost.' };

export function troubleOf(error: unknown): Trouble {
  if (!(error instanceof Refused)) return { where: 'console', sentence: String(error) };
  return { where: PLACES[error.status] ?? 'console', sentence: error.message };
}

export class Feed {
  private control = new AbortController();
  private timer: number | undefined;
  private wait = FIRST_WAIT;
  private heard = 0;

  /** `silence`: milliseconds without a message after which to connect again; 0 where messages may be rare. */
  constructor(
    private readonly address: string,
    private readonly listener: Listener,
    private readonly silence = 0,
  ) {}

  open(): void {
    this.close();
    this.heard = performance.now();
    if (this.silence) this.timer = window.setInterval(() => this.listen(), this.silence / 3);
    void this.follow(this.control.signal);
  }

  close(): void {
    clearTimeout(this.timer);
    this.control.abort();
    this.control = new AbortController();
  }

  /** Do not wait for the next attempt. */
  hurry(): void {
    this.wait = FIRST_WAIT;
    this.open();
  }

  private listen(): void {
    if (performance.now() - this.heard > this.silence) this.recover(LOST);
  }

  private async follow(signal: AbortSignal): Promise<void> {
    try {
      // Not by an EventSource, which can show no header and does not tell why it was refused.
      const { body } = await ask(this.address, { signal });
      const [reader, events] = [(body as ReadableStream<Uint8Array>).getReader(), decoder()];
      this.wait = FIRST_WAIT;
      this.listener.onOpen();
      for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
        this.heard = performance.now();
        for (const { data } of events.feed(chunk.value)) {
          if (!signal.aborted) this.listener.onSeen(JSON.parse(data) as Seen);
        }
      }
      throw new Refused(0, LOST.sentence);
    } catch (error) {
      if (!signal.aborted) this.recover(error instanceof Refused ? troubleOf(error) : LOST);
    }
  }

  private recover(trouble: Trouble): void {
    this.close();
    this.listener.onTrouble(trouble);
    this.timer = window.setTimeout(() => this.open(), this.wait * (0.75 + Math.random() / 2));
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
  }
}
