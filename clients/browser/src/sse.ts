/**
 * Server-sent events, decoded by the rules of WHATWG HTML section 9.2, from chunks cut anywhere.
 *
 * A decoder belongs to one response: `feed` what arrives, `reset` before the next response. What is unfinished when a
 * response ends was never sent, as far as the rules are concerned.
 */

export interface ServerEvent {
  /** The last event id when it was dispatched; it may come from an earlier block. */
  readonly id: string;
  readonly event: string;
  /** Empty for a priming event, which brings a position and nothing to hand on. */
  readonly data: string;
}

/** One message is one event, and a tool's result may hold a file: as much as the server's own decoder allows. */
export const MAX_EVENT_CHARS = 16 * 1024 * 1024;

/** More digits are 31,000 years, and no longer exact in a number. */
const MAX_RETRY_DIGITS = 15;

export class Decoder {
  /** The reconnection time in milliseconds that the server last asked for. It outlives a reset. */
  retry: number | undefined;

  #text = new TextDecoder();
  #rest = '';
  #data: string[] = [];
  #size = 0;
  #event = '';
  #id = '';
  #afterCr = false;

  constructor(private readonly max: number = MAX_EVENT_CHARS) {}

  reset(): void {
    this.#text = new TextDecoder();
    this.#rest = this.#event = this.#id = '';
    this.#data = [];
    this.#size = 0;
    this.#afterCr = false;
  }

  /** Take the next bytes; return the events that they complete. */
  feed(chunk: Uint8Array): ServerEvent[] {
    let text = this.#text.decode(chunk, { stream: true });
    if (text === '') return [];
    if (this.#afterCr && text.startsWith('\n')) text = text.slice(1);
    this.#afterCr = text.endsWith('\r');
    const lines = text.split(/\r\n|\n|\r/);
    lines[0] = this.#rest + lines[0];
    this.#rest = lines.pop() ?? '';
    const events = lines.flatMap((line) => this.#take(line));
    if (this.#size + this.#rest.length > this.max) throw new RangeError(`an event exceeds ${this.max} characters`);
    return events;
  }

  #take(line: string): ServerEvent[] {
    if (line === '') return this.#dispatch();
    const colon = line.indexOf(':');
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + (line[colon + 1] === ' ' ? 2 : 1));
    if (name === 'data') {
      this.#data.push(value);
      this.#size += value.length + 1;
    } else if (name === 'event') this.#event = value;
    else if (name === 'id' && !value.includes('\0')) this.#id = value;
    else if (name === 'retry' && /^\d+$/.test(value) && value.length <= MAX_RETRY_DIGITS) this.retry = Number(value);
    return [];
  }

  #dispatch(): ServerEvent[] {
    const { length } = this.#data;
    const event = { id: this.#id, event: this.#event || 'message', data: this.#data.join('\n') };
    this.#data = [];
    this.#size = 0;
    this.#event = '';
    return length ? [event] : [];
  }
}
