/** An MCP transport for web pages: Streamable HTTP whose session and running calls outlive the page. */

import { forget, type RecoveredCall } from './calls.js';
import { request } from './http.js';
import { type Link, setStatus, trouble } from './link.js';
import { cutSilent } from './lines.js';
import { type Release, take } from './lock.js';
import type { Options, SendOptions, Status } from './options.js';
import { isOffline, watch } from './page.js';
import { call, say } from './sending.js';
import { handshake, initialized, lost, readRecovered, recover } from './session.js';
import { slots } from './slots.js';
import { clear, fresh, type KeptCall, type KeyValue, load, type State, save } from './state.js';
import { type Id, isRequest, isResponse, type Message, wireId } from './wire.js';

const TICK = 5000;
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
  readonly #silence: number;
  #release: Release | undefined;
  #tick: ReturnType<typeof setInterval> | undefined;

  constructor(url: string | URL, options: Options = {}) {
    const { storage = perTab(), silence = SILENCE, streams = STREAMS } = options;
    const address = String(new URL(url, globalThis.location?.href));
    const link: Link = (this.#link = {
      url: address,
      options,
      key: options.key ?? `perdure:${address}`,
      storage: storage ?? undefined,
      state: fresh(),
      page: watch(
        (dead, restored) => this.#back(dead, restored),
        (is) => trouble(link, link, is),
      ),
      slots: slots(streams),
      running: new Map(),
      recovered: new Set(),
      lines: new Set(),
      troubled: new Set(),
      gone: () => !!link.closed || link.page.leaving,
      hand: (m) => this.onmessage?.(m),
      report: (error) => this.onerror?.(error instanceof Error ? error : new Error(String(error))),
      lost: (session) => lost(link, session),
      close: () => void this.close(),
    });
    this.#silence = silence;
  }

  get status(): Status {
    return this.#link.status ?? 'disconnected';
  }

  /** Undefined until the handshake is done: the SDK's client skips its own if it finds one here. */
  get sessionId(): string | undefined {
    const { ready, state } = this.#link;
    return ready ? state.session : undefined;
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
    this.#link.state.version = version;
    save(this.#link);
  }

  async start(): Promise<void> {
    const link = this.#link;
    const { key } = link;
    if (inUse.has(key)) throw new Error(`this page has a transport with the key ${key} already; give each its own`);
    inUse.add(key);
    trouble(link, link, isOffline());
    const found = await this.#claim(load(link));
    if (link.closed) return this.#release?.();
    if (found) link.state = found;
    link.state.life += 1;
    recover(link);
    save(link);
    this.#tick = setInterval(() => cutSilent(link, this.#silence), Math.min(TICK, this.#silence / 3));
  }

  /** The state that was found, if no other page has it; a duplicated tab begins with one of its own. */
  async #claim(found: State | undefined): Promise<State | undefined> {
    const link = this.#link;
    const shared = isShared(link.storage);
    const name = ({ tab }: State) => (shared ? link.key : `${link.key}#${tab}`);
    this.#release = await take(name(found ?? link.state));
    if (this.#release) return found;
    if (shared) link.storage = undefined;
    else this.#release = await take(name(link.state));
    return undefined;
  }

  /** End the connections. What is stored stays: the next transport goes on with the session. */
  async close(): Promise<void> {
    const link = this.#link;
    if (link.closed) return;
    link.closed = true;
    clearInterval(this.#tick);
    for (const line of link.lines) line.end();
    link.page.end();
    this.#release?.();
    inUse.delete(link.key);
    setStatus(link);
    this.onclose?.();
  }

  /** End the session itself, at the server and in storage. */
  async terminateSession(): Promise<void> {
    const link = this.#link;
    for (const line of link.lines) if (!line.call) line.end();
    if (link.state.session) await request(link, 'DELETE').catch(link.report);
    clear(link);
  }

  async send(message: unknown, options: SendOptions = {}): Promise<void> {
    const link = this.#link;
    const m = message as Message;
    const { method, params, id } = m;
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

  /** The page has its network, its visitor or its life again. */
  #back(dead: boolean, restored: boolean): void {
    const link = this.#link;
    const { tab, life } = link.state;
    const stored = restored && load(link);
    if (stored && (stored.tab !== tab || stored.life !== life)) {
      link.report(new Error('another page has gone on with the session meanwhile'));
      link.close();
    } else cutSilent(link, dead ? 0 : this.#silence);
  }
}

/** Looking at it throws where it is forbidden. */
function perTab(): KeyValue | undefined {
  try {
    return globalThis.sessionStorage;
  } catch {
    return undefined;
  }
}

function isShared(storage: KeyValue | undefined): boolean {
  try {
    return !!storage && storage === globalThis.localStorage;
  } catch {
    return false;
  }
}
