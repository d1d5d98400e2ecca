/**
 * Lines: one for each stream that is being read, the standalone one and one per running call. A line that breaks comes
 * back with its position, by itself, whatever becomes of the others.
 */

import { wait } from './backoff.js';
import { Decoder, type ServerEvent } from './sse.js';

/** What lines need of the transport. */
export interface Exchange {
  /** GET; gives `undefined` where the status settles the matter and there is nothing to read (any more). */
  open(line: Line): Promise<Response | undefined>;
  /** Events have come. What each of them changes is stored in the turn in which it is handed on. */
  deliver(line: Line, events: ServerEvent[]): Promise<void>;
  /** Whether a line is in trouble. */
  trouble(line: Line, cause?: unknown): void;
  /** Wait, or less if there is reason to hope. */
  pause(ms: number): Promise<void>;
  readonly slots: Slots;
}

/** An answer that says when to come back. */
export class ComeBack extends Error {
  constructor(readonly after: number | undefined) {
    super('the server is away');
  }
}

export class Line {
  position: string | undefined;
  /** Nothing more is to come, or to be had. */
  over = false;
  /** When the last byte came. */
  heard = Date.now();
  readonly #decoder = new Decoder();
  /** It has let go of its connection only to make room. */
  parked = false;
  #abort = new AbortController();

  constructor(
    private readonly exchange: Exchange,
    /** The call's id on the wire; the standalone stream has none. */
    readonly call?: string,
  ) {}

  get signal(): AbortSignal {
    return this.#abort.signal;
  }

  /** Read until it is over, beginning with a response that is there already or with one of its own. */
  async run(response?: Response): Promise<void> {
    for (let attempt = 0; !this.over; ) {
      const before = this.position;
      let error: unknown;
      try {
        if (response) this.exchange.slots.add(this);
        else await this.exchange.slots.enter(this);
        // Not before: whoever cuts a line that waits means the connection before.
        this.#abort = new AbortController();
        this.heard = Date.now();
        response ??= this.over ? undefined : await this.exchange.open(this);
        this.parked = false;
        if (!response) break;
        this.exchange.trouble(this);
        await this.#read(response);
      } catch (caught) {
        error = caught;
      } finally {
        response = undefined;
        this.exchange.slots.leave(this);
      }
      if (this.over) break;
      if (this.parked) continue;
      if (this.position !== before) attempt = 0;
      if (error) this.exchange.trouble(this, error);
      await this.exchange.pause((error as ComeBack | undefined)?.after ?? wait(attempt++, this.#decoder.retry));
    }
    this.exchange.trouble(this);
  }

  async #read(response: Response): Promise<void> {
    this.#decoder.reset();
    const body = response.body?.getReader();
    // A body that is aborted need not say so in every engine.
    this.signal.addEventListener('abort', () => void body?.cancel().catch(() => {}));
    while (body && !this.over) {
      const { done, value } = await body.read();
      if (done || this.signal.aborted) return;
      this.heard = Date.now();
      const events = this.#decoder.feed(value);
      if (events.length) await this.exchange.deliver(this, events);
    }
    void body?.cancel().catch(() => {});
  }

  /** Let go of the connection; it comes back when there is room. */
  park(): void {
    this.parked = true;
    this.#abort.abort();
  }

  /** The connection is believed to be dead: begin another. */
  cut(): void {
    this.#abort.abort(new Error('silent for too long'));
  }

  end(): void {
    this.over = true;
    this.#abort.abort();
  }
}

/**
 * Browsers open six connections to one server over HTTP/1.1, for all tabs together, and streams that stay open take
 * them all: the seventh request would wait for ever. So only some lines are read at a time, each for a while. Nothing
 * is lost by that, because the server keeps what comes meanwhile.
 */
export class Slots {
  /** In the order in which they began to read. */
  #reading: Line[] = [];
  #waiting: [Line, () => void][] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly most: number,
    private readonly slice = 500,
  ) {}

  async enter(line: Line): Promise<void> {
    if (this.#reading.length < this.most) this.#reading.push(line);
    else {
      await new Promise<void>((resolve) => {
        this.#waiting.push([line, resolve]);
        this.#tick();
      });
    }
  }

  /** A request has its connection already; somebody else makes room. */
  add(line: Line): void {
    this.#reading.push(line);
    this.#tick();
  }

  leave(line: Line): void {
    this.#reading = this.#reading.filter((other) => other !== line);
    while (this.#reading.length < this.most) {
      const next = this.#waiting.shift();
      if (!next) break;
      this.#reading.push(next[0]);
      next[1]();
    }
  }

  #tick(): void {
    this.#timer ??= setTimeout(() => {
      this.#timer = undefined;
      if (!this.#waiting.length && this.#reading.length <= this.most) return;
      this.#reading.find((line) => line.position !== undefined)?.park();
      this.#tick();
    }, this.slice);
  }
}
