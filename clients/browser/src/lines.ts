/**
 * Lines: one for each stream that is being read, the standalone one and one per running call. A line that breaks comes
 * back with its position, by itself, whatever becomes of the others.
 */

import { wait } from './backoff.js';
import { type Call, giveUp, settle, unknown } from './calls.js';
import { Meaning, ofResponse, Sent } from './delivery.js';
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
  /** The server has such a stream: it was open once. */
  proven?: boolean;
  /** When the last byte came. */
  heard!: number;
  retry: number | undefined;
  /** How often lines had got through again when this one last tried. */
  returns = 0;
  /** Ends its pause. */
  hurry: (() => void) | undefined;
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
  for (let attempt = 0, hurried = false; !line.over; ) {
    const before = line.position;
    line.returns = link.returns;
    let error: unknown;
    try {
      if (response) slots.add(line);
      else await slots.enter(line);
      // Not before: a caller that cuts a line which waits means the earlier connection.
      line.abort = new AbortController();
      line.heard = Date.now();
      const what = line.parked ? 'turn' : 'open';
      line.parked = false; // from here on it says that this connection makes room, not one before it
      if (!line.over) response ??= await open(link, line, what);
      if (response) await read(link, line, response, hurried);
    } catch (caught) {
      error = caught;
    } finally {
      response = undefined;
      slots.leave(line);
    }
    if (line.over || line.parked) continue;
    if (error instanceof RangeError) {
      // An event that is too large would come again and again.
      line.end();
      if (!line.call) link.report(error);
      else settle(link, line.call, line.call.again ? error : unknown(line.call.kept, String(error)));
    } else if (line.call && !line.position) {
      // A page that goes loses its connections; what becomes of its calls is the next page's affair.
      if (page.leaving) await page.awake();
      line.end();
      giveUp(link, line.call, 'the connection was lost');
    } else {
      if (line.position !== before) attempt = 0;
      if (error) broken(link, line, error);
      const after = (error as Refused | undefined)?.after;
      await (after ? page.pause(after) : rest(link, line, wait(attempt++, line.retry)));
      hurried = !after && line.returns !== link.returns;
    }
  }
  save(link);
}

/** Pause, at most until another line gets through again. */
async function rest({ page, returns }: Link, line: Line, ms: number): Promise<void> {
  if (line.returns === returns) await Promise.race([page.pause(ms), new Promise<void>((done) => (line.hurry = done))]);
}

function broken(link: Link, line: Line, error: unknown): void {
  trouble(link, line, error);
  if (link.page.leaving) return;
  trace(link, 'broken', line, error);
  if (statusOf(error) === 401 || statusOf(error) === 403) link.report(error);
}

/** GET. Gives nothing, and ends the line, where the response settles the matter. */
async function open(link: Link, line: Line, what: 'turn' | 'open'): Promise<Response | undefined> {
  const { position, call, abort, proven } = line;
  await link.page.awake();
  const { session } = link.state;
  const [response, error] = await request(link, 'GET', { headers: { 'last-event-id': position }, signal: abort.signal });
  const { status } = response;
  const sent = call ? (call.again ? Sent.ReadResumed : Sent.CallResumed) : Sent.Listener;
  const mayRenew = session && (call || position || proven);
  const meaning = ofResponse(sent, { status, isStream: !error, mayRenew, hasPosition: position });
  if (meaning === Meaning.Follow) {
    trace(link, what, line);
    return response;
  }
  if (meaning === Meaning.Again) throw error;
  line.end();
  if (meaning === Meaning.Renew) void link.lost(session as string).catch(() => {});
  else if (call) giveUp(link, call, `no answer (${status})`);
  else if (meaning === Meaning.Restart) {
    delete link.state.standalone;
    void listen(link, new Line());
  }
  return undefined;
}

async function read(link: Link, line: Line, { body }: Response, hurried: boolean): Promise<void> {
  const { signal } = line.abort;
  const events = decoder();
  const reader = body?.getReader();
  const stop = () => void reader?.cancel().catch(() => {});
  // A body that is aborted need not say so in every engine.
  signal.addEventListener('abort', stop);
  line.onopen?.();
  line.proven = true;
  // Calls that come back much later than the others would have their notifications on the standalone stream. Only a line
  // that has waited by itself hurries others: those that a server drops at once would chase each other without a pause.
  if (!hurried && link.troubled.has(line)) {
    line.returns = ++link.returns;
    for (const other of link.lines) other.hurry?.();
  }
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

/** After a sleep, connections are dead without a sign: begin others. Clocks may have been set meanwhile. */
export function cutSilent({ lines }: Link, ms: number): void {
  for (const { position, heard, abort } of lines)
    if (position && Math.abs(Date.now() - heard) >= ms) abort.abort(new Error('silence'));
}
