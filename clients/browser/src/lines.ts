/**
 * Lines: one for each stream that is being read, the standalone one and one per running call. A line that breaks comes
 * back with its position, by itself, whatever becomes of the others.
 */

import { wait } from './backoff.js';
import { type Call, giveUp, settle } from './calls.js';
import type { Refused } from './errors.js';
import { request, statusOf } from './http.js';
import { deliver } from './incoming.js';
import { type Link, trace, trouble } from './link.js';
import type { Reader } from './slots.js';
import { decoder } from './sse.js';
import { save } from './state.js';

export class Line implements Reader {
  /** Nothing more is to come, or to be had. */
  over?: boolean;
  /** It has let go of its connection only to make room. */
  parked?: boolean;
  /** When the last byte came. */
  heard!: number;
  retry: number | undefined;
  abort = new AbortController();
  /** It has been opened for the first time, or never will be. */
  onopen: (() => void) | undefined;

  constructor(
    /** The standalone stream has none. */
    readonly call?: Call,
    public position: string | undefined = undefined,
  ) {}

  /** Let go of the connection; it comes back when there is room. */
  park(): void {
    this.parked = true;
    this.abort.abort();
  }

  end(): void {
    this.over = true;
    this.abort.abort();
  }
}

/** Read a stream to its end: a response that is there already, or one of its own. */
export function listen(link: Link, line: Line, response?: Response): Promise<void> {
  link.lines.add(line);
  if (line.call) line.call.line = line;
  const opened = new Promise<void>((resolve) => (line.onopen = resolve));
  void run(link, line, response).finally(() => {
    line.onopen?.();
    link.lines.delete(line);
    trouble(link, line);
  });
  return opened;
}

async function run(link: Link, line: Line, response: Response | undefined): Promise<void> {
  const { slots, page } = link;
  for (let attempt = 0; !line.over; ) {
    const before = line.position;
    let error: unknown;
    try {
      if (response) slots.add(line);
      else await slots.enter(line);
      // Not before: whoever cuts a line that waits means the connection before.
      line.abort = new AbortController();
      line.heard = Date.now();
      const what = line.parked ? 'turn' : 'open';
      line.parked = false; // from here on it says that this connection makes room, not one before it
      if (!line.over) response ??= await open(link, line, what);
      if (response) await read(link, line, response);
    } catch (caught) {
      error = caught;
    } finally {
      response = undefined;
      slots.leave(line);
    }
    if (line.over || line.parked) continue;
    if (line.call && !line.position) {
      line.end();
      giveUp(link, line.call, 'the connection was lost');
    } else {
      if (line.position !== before) attempt = 0;
      if (error) broken(link, line, error);
      await page.pause((error as Refused | undefined)?.after || wait(attempt++, line.retry));
    }
  }
  save(link);
}

function broken(link: Link, line: Line, error: unknown): void {
  trouble(link, line, error);
  if (link.page.leaving) return;
  trace(link, 'broken', line, error);
  if (statusOf(error) === 401) link.report(error);
}

/** GET. Gives nothing, and ends the line, where the status settles the matter. */
async function open(link: Link, line: Line, what: 'turn' | 'open'): Promise<Response | undefined> {
  const { position, call, abort } = line;
  await link.page.awake();
  const { session } = link.state;
  try {
    const response = await request(link, 'GET', { headers: { 'last-event-id': position }, signal: abort.signal });
    trace(link, what, line);
    return response;
  } catch (error) {
    const status = statusOf(error);
    if (!status || status === 401 || status === 429 || status >= 500) throw error;
    line.end();
    if (status === 404 && session) void link.lost(session).catch(() => {});
    else if (call) settle(link, call, `no answer (${status})`);
    else if (status === 400 && position) {
      // A position that the server cannot use.
      delete link.state.standalone;
      void listen(link, new Line());
    } else if (status !== 405) link.report(error); // 405: there is no such stream here
    return undefined;
  }
}

async function read(link: Link, line: Line, { body }: Response): Promise<void> {
  const { signal } = line.abort;
  const events = decoder();
  const reader = body?.getReader();
  const stop = () => void reader?.cancel().catch(() => {});
  // A body that is aborted need not say so in every engine.
  signal.addEventListener('abort', stop);
  line.onopen?.();
  trouble(link, line);
  while (reader && !line.over) {
    const { done, value } = await reader.read();
    if (done || signal.aborted) return;
    line.heard = Date.now();
    const come = events.feed(value);
    line.retry = events.retry ?? line.retry;
    if (come.length) await deliver(link, line, come);
  }
  stop();
}

/** After a sleep, connections are dead and nobody has said so: begin others. Clocks may have been set meanwhile. */
export function cutSilent({ lines }: Link, ms: number): void {
  for (const { position, heard, abort } of lines)
    if (position && Math.abs(Date.now() - heard) >= ms) abort.abort(new Error('silence'));
}
