/** An MCP transport for web pages: Streamable HTTP whose session and running calls outlive the page. */

import { forget, type RecoveredCall } from './calls.js';
import { request } from './http.js';
import { type Link, setStatus, trouble } from './link.js';
import { cutSilent } from './lines.js';
import { claim } from './lock.js';
import type { Options, SendOptions, Status } from './options.js';
import { isOffline, watch } from './page.js';
import { call, say } from './sending.js';
import { begin, handshake, initialized, lost, readRecovered, recover } from './session.js';
import { sendModern } from './modern.js';
import { slots } from './slots.js';
import { clear, fresh, type KeptCall, load, save } from './state.js';
import { tried } from './tried.js';
import { CAPABILITIES, type Id, isRequest, isResponse, isSessionless, isModern, type Message, VERSION, wireId } from './wire.js';

/** Keep-alives come every 30 s unless the server is told otherwise. */
const SILENCE = 45_000;
/** Two of six connections stay free for requests and for other tabs. */
const STREAMS = 4;

/** The keys of this page's transports. */
const inUse = new Set<string>();

export class PerdureTransport {
  onclose?: (() => void) | undefined;
  onerror?: ((error: Error) => void) | undefined;
  // biome-ignore lint: the SDKs' own message types differ from each other
  onmessage?: ((message: any, extra?: any) => void) | undefined;

  readonly #link: Link;

  constructor(url: string | URL, options: Options = {}) {
    // Looking at storage throws where it is forbidden.
    const { storage = tried(() => sessionStorage), silence = SILENCE, streams = STREAMS } = options;
    const address = String(new URL(url, globalThis.location?.href));
    const link: Link = (this.#link = {
      url: address,
      options,
      key: options.key ?? `perdure:${address}`,
      storage: storage ?? undefined,
      state: fresh(),
      page: watch(silence, {
        look: (dead, restored) => look(link, dead ? 0 : silence, restored),
        offline: (is) => trouble(link, link, is),
      }),
      slots: slots(streams),
      running: new Map(),
      recovered: new Set(),
      lines: new Set(),
      troubled: new Set(),
      returns: 0,
      hand: (m) => this.onmessage?.(m),
      report: (error) => this.onerror?.(error as Error),
      lost: (session) => lost(link, session),
      close: () => void this.close(),
    });
  }

  get status(): Status {
    return this.#link.status ?? 'disconnected';
  }

  /** Undefined until the handshake is done: the SDK's client skips its own if it finds one here. */
  get sessionId(): string | undefined {
    const { ready, modern, state } = this.#link;
    return ready && !modern ? state.session : undefined;
  }

  /** Positions as they are stored: of the standalone stream, and of the calls that run. */
  get positions(): { standalone: string | undefined; calls: readonly KeptCall[] } {
    const { standalone, calls } = this.#link.state;
    return { standalone, calls: Object.values(calls) };
  }

  /** The calls of pages before this one. They are read from the next turn on: set `onnotification` at once. */
  pending(): RecoveredCall[] {
    const link = this.#link;
    link.taken = true;
    setTimeout(() => readRecovered(link));
    return [...link.recovered].map(({ recovered }) => recovered as RecoveredCall);
  }

  setProtocolVersion(version: string): void {
    const link = this.#link;
    if (!isSessionless(version)) {
      link.state.version = version;
      return save(link);
    }
    // The client is connected, also where it knew the server and asked nothing.
    link.envelope ??= { [VERSION]: version, [CAPABILITIES]: {} };
    link.ready = link.modern = true;
    setStatus(link);
    setTimeout(() => void begin(link));
  }

  async start(): Promise<void> {
    const link = this.#link;
    const { key } = link;
    if (inUse.has(key)) throw new Error(`the key ${key} is in use: give another`);
    inUse.add(key);
    link.page.begin();
    trouble(link, link, isOffline());
    link.state = await claim(link);
    if (link.closed) return link.release?.();
    link.state.life += 1;
    recover(link);
    save(link);
  }

  /** End the connections. What is stored stays: the next transport goes on with the session. */
  async close(): Promise<void> {
    const link = this.#link;
    if (link.closed) return;
    link.closed = true;
    for (const line of link.lines) line.end();
    link.page.end();
    link.release?.();
    inUse.delete(link.key);
    setStatus(link);
    this.onclose?.();
  }

  /** End the session itself, at the server and in storage. */
  async terminateSession(): Promise<void> {
    const link = this.#link;
    for (const line of link.lines) if (!line.call) line.end();
    if (link.state.session)
      await request(link, 'DELETE').then(([{ ok }, error]) => ok || link.report(error), link.report);
    clear(link);
  }

  async send(message: unknown, options: SendOptions = {}): Promise<void> {
    const link = this.#link;
    const m = message as Message;
    const { method, params, id } = m;
    if (isModern(m)) return sendModern(link, m, options);
    await link.renewing;
    if (isRequest(m)) return method === 'initialize' ? handshake(link, m, options) : call(link, m, options);
    if (method === 'notifications/initialized') return initialized(link, m);
    if (method === 'notifications/cancelled') {
      const requestId = wireId(link.state.life, params?.['requestId'] as Id);
      const given = link.running.get(requestId);
      if (given) forget(link, given); // the client does not wait for its answer
      await say(link, { ...m, params: { ...params, requestId } }, options.headers);
    } else await say(link, m, options.headers);
    if (isResponse(m)) delete link.state.asks[id as Id];
    save(link);
  }
}

/** Connections that have been silent for so long are dead. */
function look(link: Link, ms: number, restored = false): void {
  const { tab, life } = link.state;
  const stored = restored && load(link);
  if (stored && (stored.tab !== tab || stored.life !== life)) {
    // It was in the browser's cache meanwhile, and the page that came after it has what was stored.
    link.report(new Error('another page has the session now'));
    link.close();
  } else cutSilent(link, ms);
}
