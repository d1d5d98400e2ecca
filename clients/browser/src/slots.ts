/**
 * Browsers open six connections to one server over HTTP/1.1, for all tabs together, and streams that stay open take
 * them all: the seventh request would wait for ever. So only some lines are read at a time, each for a while. Nothing
 * is lost by that, because the server keeps what comes meanwhile.
 */

/** Who reads. Only one that has a position can come back to its place. */
export interface Reader {
  readonly position: string | undefined;
  park(): void;
}

export interface Slots {
  /** Wait for a place. */
  enter(reader: Reader): Promise<void>;
  /** A request has its connection already; somebody else makes room. */
  add(reader: Reader): void;
  leave(reader: Reader): void;
}

/** How long each may read while others wait, in milliseconds. */
const SLICE = 500;

export function slots(most: number, slice: number = SLICE): Slots {
  /** In the order in which they began to read. */
  const reading = new Set<Reader>();
  const waiting: (() => void)[] = [];
  let timer: ReturnType<typeof setTimeout> | undefined;

  function tick(): void {
    timer ??= setTimeout(() => {
      timer = undefined;
      if (!waiting.length && reading.size <= most) return;
      [...reading].find(({ position }) => position)?.park();
      tick();
    }, slice);
  }

  function add(reader: Reader): void {
    reading.add(reader);
    if (reading.size > most) tick();
  }

  return {
    add,
    async enter(reader) {
      if (reading.size >= most) {
        tick();
        await new Promise<void>((resolve) => waiting.push(resolve));
      }
      add(reader);
    },
    leave(reader) {
      reading.delete(reader);
      if (reading.size < most) waiting.shift()?.();
    },
  };
}
