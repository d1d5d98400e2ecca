/**
 * Server-sent events, decoded by the rules of WHATWG HTML section 9.2, from chunks cut anywhere.
 *
 * A decoder belongs to one response. What is unfinished when a response ends was never sent, as far as the rules are
 * concerned.
 */

export interface ServerEvent {
  /** The last event id when it was dispatched; it may come from an earlier block. */
  readonly id: string;
  readonly event: string;
  /** Empty for a priming event, which brings a position and nothing to hand on. */
  readonly data: string;
}

export interface Decoder {
  /** Take the next bytes; gives the events that they complete. */
  feed(chunk: Uint8Array): ServerEvent[];
  /** The reconnection time in milliseconds that the server last asked for. */
  retry?: number;
}

/** One message is one event, and a tool's result may hold a file: as much as the server's own decoder allows. */
export const MAX_EVENT_CHARS = 16 * 1024 * 1024;

export function decoder(max: number = MAX_EVENT_CHARS): Decoder {
  const decode = new TextDecoder();
  let rest = '';
  let data: string[] = [];
  let size = 0;
  let event = '';
  let id = '';
  let afterCr = false;

  /** One whole line: a field, or the end of an event. */
  function take(line: string): ServerEvent[] {
    const [, name, value = ''] = /^([^:]*)(?:: ?([^]*))?/.exec(line) ?? [];
    if (name === 'data') {
      data.push(value);
      size += value.length + 1;
    } else if (name === 'event') event = value;
    else if (name === 'id' && !value.includes('\0')) id = value;
    // More digits are 31,000 years, and no longer exact in a number.
    else if (name === 'retry' && /^\d{1,15}$/.test(value)) self.retry = +value;
    if (line) return [];
    const found = data.length ? [{ id, event: event || 'message', data: data.join('\n') }] : [];
    data = [];
    size = 0;
    event = '';
    return found;
  }

  const self: Decoder = {
    feed(chunk) {
      let text = decode.decode(chunk, { stream: true });
      if (!text) return [];
      if (afterCr && text[0] === '\n') text = text.slice(1);
      afterCr = text.endsWith('\r');
      const lines = text.split(/\r\n|\n|\r/);
      lines[0] = rest + lines[0]; // a long line is not looked through again with every chunk
      rest = lines.pop() as string;
      const events = lines.flatMap(take);
      if (size + rest.length > max) throw new RangeError(`an event exceeds ${max} characters`);
      return events;
    },
  };
  return self;
}
