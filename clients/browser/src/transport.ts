/**
 * An MCP transport for web pages: Streamable HTTP whose session and running calls outlive the page.
 *
 * After a reload there are two ways back. Where no call was running, the client's own handshake goes to the server with
 * the old session's id, and the server answers as it did the first time (reattach). Where calls are running, the
 * handshake is answered from storage, once the server has shown that it still knows the session: a reattach would begin
 * a new incarnation, in which those calls could no longer be cancelled, and would send what they say meanwhile to
 * another stream.
 */

import { wait } from './backoff.js';
import { type Notification, RecoveredCall } from './calls.js';
import { OutcomeUnknown, Refused, SessionLost, Unauthorized } from './errors.js';
import { answerIn, isEventStream, isNotNow, request, retryAfter, type Sending, textOf } from './http.js';
import { ComeBack, type Exchange, Line, Slots } from './lines.js';
import { type Release, take } from './lock.js';
import type { Asked, Options, SendOptions, Status, Trace } from './options.js';
import { isOffline, Page } from './page.js';
import type { ServerEvent } from './sse.js';
import { Keeper, type KeptCall, type KeyValue, type State } from './state.js';
import { type Id, Ids, isKept, isRepeatable, isRequest, isResponse, type Message, tokenOf, withToken } from './wire.js';

/** A request of this page or of one before it. */
interface Running {
  kept: KeptCall;
  recovered?: RecoveredCall;
  onposition?: ((position: string) => void) | undefined;
  line?: Line;
}

/** Attempts for what may be sent twice; together with the waits between them about a minute. */
const ATTEMPTS = 7;
const FOR_EVER = Infinity;
const TICK = 5000;
/** Keep-alives come every 30 s unless the server is told otherwise. */
const SILENCE = 45_000;
/** Two of six connections stay free for requests and for other tabs. */
const STREAMS = 4;

const inUse = new Set<string>();

export class PerdureTransport {
  onclose?: (() => void) | undefined;
  onerror?: ((error: Error) => void) | undefined;
  // biome-ignore lint: the SDKs' own message types differ from each other
  onmessage?: ((message: any, extra?: any) => void) | undefined;

  readonly #url: string;
  readonly #options: Options;
  readonly #exchange: Exchange;
  readonly #silence: number;
  readonly #page = new Page(
    (dead) => this.#cutSilent(dead ? 0 : undefined),
    (is) => this.#trouble(this, is ? new Error('offline') : undefined),
  );
  #keeper: Keeper;
  #ids = new Ids(0);
  #running = new Map<string, Running>();
  #recovered = new Map<string, RecoveredCall>();
  #lines = new Set<Line>();
  #troubled = new Set<unknown>();
  #status: Status | undefined;
  #ready = false;
  #resumed = false;
  #closed = false;
  #renewing: Promise<void> | undefined;
  #release: Release | undefined;
  #tick: ReturnType<typeof setInterval> | undefined;

  constructor(url: string | URL, options: Options = {}) {
    this.#url = String(new URL(url, globalThis.location?.href));
    this.#options = options;
    this.#keeper = this.#keep(options.storage === undefined ? perTab() : (options.storage ?? undefined));
    this.#silence = options.silence ?? SILENCE;
    this.#exchange = {
      open: (line) => this.#open(line),
      deliver: (line, events) => this.#deliver(line, events),
      trouble: (line, cause) => this.#trouble(line, cause),
      pause: (ms) => this.#page.pause(ms),
      slots: new Slots(options.streams ?? STREAMS),
    };
  }

  get status(): Status {
    return this.#status ?? 'disconnected';
  }

  /** Undefined until the handshake is done: the SDK's client skips its own if it finds one here. */
  get sessionId(): string | undefined {
    return this.#ready ? this.#state.session : undefined;
  }

  /** Positions as they are stored: of the standalone stream, and of the calls that run. */
  get positions(): { standalone: string | undefined; calls: readonly KeptCall[] } {
    const { standalone, calls } = this.#state;
    return { standalone, calls: Object.values(calls) };
  }

  /** The calls of pages before this one. They are read from the next turn on: set `onnotification` at once. */
  pending(): RecoveredCall[] {
    const calls = [...this.#recovered.values()];
    setTimeout(() => this.#readRecovered());
    return calls;
  }

  setProtocolVersion(version: string): void {
    this.#state.version = version;
    this.#save();
  }

  // Beginning and end

  async start(): Promise<void> {
    const { key } = this.#keeper;
    if (inUse.has(key)) throw new Error(`this page has a transport with the key ${key} already; give each its own`);
    inUse.add(key);
    this.#trouble(this, isOffline() ? new Error('offline') : undefined);
    const found = await this.#claim(this.#keeper.load());
    if (this.#closed) return;
    if (found) this.#keeper.state = found;
    this.#state.life += 1;
    this.#ids = new Ids(this.#state.life);
    this.#recover();
    this.#save();
    this.#tick = setInterval(() => this.#cutSilent(), Math.min(TICK, this.#silence / 3));
  }

  /** The state that was found, if no other page has it; a duplicated tab begins with one of its own. */
  async #claim(found: State | undefined): Promise<State | undefined> {
    const shared = isShared(this.#options.storage);
    const name = (state: State) => (shared ? this.#keeper.key : `${this.#keeper.key}#${state.tab}`);
    this.#release = await take(name(found ?? this.#state));
    if (this.#release) return found;
    if (shared) this.#keeper = this.#keep(undefined);
    else this.#release = await take(name(this.#state));
    return undefined;
  }

  /** End the connections. What is stored stays: the next transport goes on with the session. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    clearInterval(this.#tick);
    for (const line of this.#lines) line.end();
    this.#page.end();
    this.#release?.();
    inUse.delete(this.#keeper.key);
    this.#setStatus();
    this.onclose?.();
  }

  /** End the session itself, at the server and in storage. */
  async terminateSession(): Promise<void> {
    if (this.#state.session !== undefined) await this.#fetch('DELETE').catch((error) => this.#report(error));
    this.#keeper.clear();
  }

  // What the client sends

  async send(message: unknown, options: SendOptions = {}): Promise<void> {
    const m = message as Message;
    if (this.#closed) throw new Error('the transport is closed');
    await this.#renewing;
    if (m.method === 'initialize') await this.#handshake(m, options);
    else if (m.method === 'notifications/initialized') await this.#initialized(m);
    else if (isRequest(m)) await this.#call(m, options);
    else await this.#say(m, options);
  }

  /** A notification, or a response to one of the server's requests. Hearing it twice does no harm there. */
  async #say(m: Message, { headers }: SendOptions = {}): Promise<void> {
    await textOf(await this.#post(this.#ids.out(m), { headers }, ATTEMPTS));
    if (isResponse(m)) {
      delete this.#state.asks[m.id];
      this.#save();
    }
  }

  async #call(m: Message & { id: Id; method: string }, options: SendOptions, reconnect?: string): Promise<void> {
    const wire = this.#ids.out(m);
    const id = wire.id as string;
    const token = tokenOf(m);
    const kept: KeptCall = { id: m.id, method: m.method, params: m.params, ...(token !== undefined && { token }) };
    const running: Running = { kept, onposition: options.onresumptiontoken };
    this.#running.set(id, running);
    if (isKept(m.method)) {
      this.#state.calls[id] = kept;
      this.#save();
    }
    try {
      const attempts = isRepeatable(m.method) ? ATTEMPTS : 0;
      const response = await this.#post(wire, { headers: options.headers, reconnect }, attempts);
      if (m.method === 'initialize') this.#opened(response, m);
      this.#take(response, id, running);
    } catch (error) {
      this.#forget(id);
      this.#save();
      throw error;
    }
  }

  /** An answer has begun. */
  #take(response: Response, id: string, running: Running): void {
    const line = this.#line(id);
    running.line = line;
    if (isEventStream(response)) return void line.run(response);
    void answerIn(response)
      .then((m) => this.#route(m, line))
      .catch((error) => this.#settle(id, new OutcomeUnknown(running.kept.method, running.kept.params, String(error))))
      .then(() => this.#save());
  }

  /**
   * POST until there is an answer that counts. Only what may be sent twice gets attempts, unless the server has not
   * taken it; who has no end of them looks at a 404 alone.
   */
  async #post(m: Message, sending: Sending, attempts: number): Promise<Response> {
    for (let attempt = 0; ; attempt++) {
      await this.#page.online();
      const { session } = this.#state;
      let after: number | undefined;
      try {
        const response = await this.#fetch('POST', { ...sending, body: m });
        const { ok, status } = response;
        if (ok || (status === 404 && attempts === FOR_EVER)) {
          this.#trouble(m);
          return response;
        }
        if (status === 404 && session && m.method !== 'initialize' && attempt === 0) {
          // It was refused, so it has not run, and may be sent to the next session.
          await this.#lost(session);
          continue;
        }
        const refused = new Refused(status, await textOf(response));
        if (!isNotNow(response) && (status < 500 || attempt >= attempts)) throw refused;
        if (attempt >= Math.max(attempts, ATTEMPTS)) throw refused;
        after = retryAfter(response);
        this.#trouble(m, refused);
      } catch (error) {
        if (error instanceof Refused || attempt >= attempts || this.#closed) {
          this.#trouble(m);
          if (error instanceof Refused || !m.method) throw error;
          throw new OutcomeUnknown(m.method, m.params, 'the connection was lost');
        }
        this.#trouble(m, error);
      }
      await this.#page.pause(after ?? wait(attempt, undefined));
    }
  }

  // Handshakes

  async #handshake(m: Message, options: SendOptions): Promise<void> {
    const { session, handshake } = this.#state;
    const same = session !== undefined && agree(handshake?.params, m.params);
    if (this.#recovered.size && same && handshake?.result && (await this.#alive())) {
      this.#resumed = true;
      this.onmessage?.({ jsonrpc: '2.0', id: m.id, result: handshake.result });
      return;
    }
    if (this.#recovered.size && session !== undefined) this.#abandon(session);
    const reconnect = this.#state.session;
    this.#state.asks = {}; // they are asked again
    await this.#call(m as Message & { id: Id; method: string }, options, reconnect);
  }

  /** The answer to `initialize` tells which session it is. */
  #opened(response: Response, m: Message): void {
    const session = response.headers.get('mcp-session-id') ?? undefined;
    const before = this.#state.session;
    if (before !== undefined && before !== session) this.#abandon(before);
    if (session !== undefined) this.#state.session = session;
    this.#state.handshake = { params: m.params, result: undefined };
  }

  /** Whether the server still knows the session. It waits for a server that is away. */
  async #alive(): Promise<boolean> {
    const ping: Message = { jsonrpc: '2.0', id: this.#ids.wire('ping'), method: 'ping' };
    const response = await this.#post(ping, {}, FOR_EVER);
    await textOf(response);
    return response.ok;
  }

  async #initialized(m: Message): Promise<void> {
    if (!this.#resumed) await this.#say(m);
    this.#ready = true;
    this.#setStatus();
    setTimeout(() => this.#begin());
  }

  /** Everything is in place: go on where the page before has left. */
  #begin(): void {
    if (this.#closed) return;
    for (const ask of Object.values(this.#state.asks)) this.onmessage?.(ask);
    const { onrecovered } = this.#options;
    if (onrecovered) {
      for (const call of this.#recovered.values()) this.#guard(() => onrecovered(call));
      this.#readRecovered();
    }
    if (this.#state.session !== undefined) this.#listenStandalone();
  }

  #listenStandalone(): void {
    const line = this.#line();
    line.position = this.#state.standalone;
    void line.run();
  }

  #recover(): void {
    for (const [id, kept] of Object.entries(this.#state.calls)) {
      const cancel = (reason?: string) => this.#cancel(id, reason);
      const call = new RecoveredCall(kept, cancel);
      this.#recovered.set(id, call);
      this.#running.set(id, { kept, recovered: call });
    }
  }

  #readRecovered(): void {
    if (!this.#ready || this.#closed) return;
    for (const [id, call] of this.#recovered) {
      const running = this.#running.get(id);
      if (running && !running.line) {
        if (running.kept.position === undefined) {
          const { method, params } = running.kept;
          this.#settle(id, new OutcomeUnknown(method, params, 'the page went before the server had answered'));
        } else {
          running.line = this.#line(id);
          running.line.position = running.kept.position;
          void running.line.run();
        }
      }
      if (call.settled) this.#recovered.delete(id);
    }
    this.#save();
  }

  async #cancel(id: string, reason?: string): Promise<void> {
    const params = { requestId: id, ...(reason !== undefined && { reason }) };
    const m: Message = { jsonrpc: '2.0', method: 'notifications/cancelled', params };
    await textOf(await this.#post(m, {}, ATTEMPTS));
  }

  // When the session is gone

  #lost(session: string): Promise<void> {
    if (session !== this.#state.session) return this.#renewing ?? Promise.resolve();
    return (this.#renewing ??= this.#renew(session).finally(() => (this.#renewing = undefined)));
  }

  /** One new handshake, with what the client said the first time. */
  async #renew(session: string): Promise<void> {
    const params = this.#state.handshake?.params;
    this.#ready = false;
    this.#setStatus();
    this.#abandon(session);
    for (const line of this.#lines) line.end();
    const m: Message = { jsonrpc: '2.0', id: this.#ids.wire('renew'), method: 'initialize', ...withParams(params) };
    try {
      const response = await this.#post(m, {}, ATTEMPTS);
      this.#opened(response, m);
      const answer = await answerIn(response);
      if (!answer.result) throw new Refused(200, JSON.stringify(answer.error));
      this.#shaken(answer.result);
      await this.#say({ jsonrpc: '2.0', method: 'notifications/initialized' });
      this.#ready = true;
      this.#setStatus();
      if (this.#state.session !== undefined) this.#listenStandalone();
    } catch (error) {
      this.#report(error);
      await this.close();
      throw error;
    }
  }

  /** Nobody will ever know what became of the calls that run. */
  #abandon(session: string): void {
    const running = [...this.#running];
    this.#keeper.clear();
    this.#guard(() => this.#options.onlost?.(session));
    for (const [id, { kept, recovered, line }] of running) {
      if (recovered || line) this.#settle(id, new SessionLost(kept.method, kept.params, 'the session is gone'));
      else if (isKept(kept.method)) this.#state.calls[id] = kept; // on its way, and not accepted there
    }
  }

  #shaken(result: unknown): void {
    const { handshake } = this.#state;
    this.#state.handshake = { params: handshake?.params, result };
    const version = (result as { protocolVersion?: string }).protocolVersion;
    if (version !== undefined) this.#state.version = version;
    this.#save();
  }

  // What comes in

  async #deliver(line: Line, events: ServerEvent[]): Promise<void> {
    const messages = events.map(({ id, data }) => [id, data ? (JSON.parse(data) as Message) : undefined] as const);
    let told = false;
    for (const [id, m] of messages) {
      if (m && isResponse(m) && told) {
        // The SDK's client hands notifications on a moment later, and drops those that its answer overtakes.
        this.#save();
        await nextTurn();
      }
      if (line.over || this.#page.leaving) return; // the next page will read it
      if (id) this.#moved(line, id);
      this.#trace('event', line);
      if (m) this.#route(m, line);
      told ||= m !== undefined;
    }
    this.#save();
  }

  #moved(line: Line, position: string): void {
    line.position = position;
    if (line.call === undefined) {
      this.#state.standalone = position;
      return;
    }
    const running = this.#running.get(line.call);
    if (running) running.kept.position = position;
    running?.onposition?.(position);
  }

  #route(m: Message, line: Line): void {
    if (isResponse(m)) return this.#answer(m);
    if (m.method === 'notifications/perdure/gap') return this.#gap(m, line);
    if (isRequest(m)) this.#state.asks[m.id] = m;
    if (m.method === 'notifications/cancelled') delete this.#state.asks[m.params?.['requestId'] as Id];
    if (m.method === 'notifications/progress') return this.#progress(m);
    const recovered = line.call === undefined ? undefined : this.#running.get(line.call)?.recovered;
    if (recovered && !isRequest(m)) this.#tell(recovered, m);
    this.#guard(() => this.onmessage?.(m));
  }

  #answer(m: Message & { id: Id }): void {
    const running = this.#running.get(m.id as string);
    if (!running) return; // of a call that was given up
    this.#forget(m.id as string);
    if (running.kept.method === 'initialize' && m.result) this.#shaken(m.result);
    if (running.recovered) {
      running.recovered.answer(m);
      this.#recovered.delete(m.id as string);
    } else this.#guard(() => this.onmessage?.({ ...m, id: running.kept.id }));
  }

  /** Its token tells whose it is, on whatever stream it comes. */
  #progress(m: Message): void {
    const token = String(m.params?.['progressToken']).replace(/^\d+:/, '');
    const running = this.#running.get(token);
    if (running?.kept.token === undefined) return; // nobody waits for it
    const told = withToken(m, running.kept.token);
    if (running.recovered) this.#tell(running.recovered, told);
    else this.#guard(() => this.onmessage?.(told));
  }

  #tell(call: RecoveredCall, m: Message): void {
    this.#guard(() => call.onnotification?.(m as Notification));
  }

  #gap(m: Message, line: Line): void {
    const { from, to, reason } = m.params as { from: number; to: number; reason: string };
    const call = this.#shown(line);
    this.#guard(() => this.#options.ongap?.({ from, to, reason, ...(call && { call }) }));
  }

  #shown(line: Line): Asked | undefined {
    const kept = line.call === undefined ? undefined : this.#running.get(line.call)?.kept;
    return kept && { method: kept.method, params: kept.params };
  }

  /** A request ends without the server's answer. */
  #settle(id: string, error: OutcomeUnknown): void {
    const running = this.#running.get(id);
    this.#forget(id);
    if (!running) return;
    if (running.recovered) return running.recovered.fail(error);
    const { code, message, data } = error;
    this.#guard(() => this.onmessage?.({ jsonrpc: '2.0', id: running.kept.id, error: { code, message, data } }));
  }

  #forget(id: string): void {
    this.#running.get(id)?.line?.end();
    this.#running.delete(id);
    delete this.#state.calls[id];
  }

  // Lines

  #line(call?: string): Line {
    const line = new Line(this.#exchange, call);
    this.#lines.add(line);
    return line;
  }

  async #open(line: Line): Promise<Response | undefined> {
    await this.#page.online();
    const { session } = this.#state;
    const response = await this.#fetch('GET', { position: line.position, signal: line.signal });
    if (response.ok) {
      this.#trace(line.parked ? 'turn' : 'open', line);
      return response;
    }
    const { status } = response;
    if (isNotNow(response) || status >= 500) throw new ComeBack(retryAfter(response));
    line.end();
    if (status === 404 && session !== undefined) void this.#lost(session).catch(() => {});
    else if (line.call !== undefined) this.#unanswered(line.call, status);
    else if (status === 400 && line.position !== undefined) this.#anew();
    else if (status !== 405) this.#report(new Refused(status, await textOf(response))); // 405: no such stream here
    return undefined;
  }

  #unanswered(id: string, status: number): void {
    const { method, params } = this.#running.get(id)?.kept ?? { method: '', params: undefined };
    this.#settle(id, new OutcomeUnknown(method, params, `the server has no answer for it (${status})`));
    this.#save();
  }

  /** The standalone stream, without the position that the server cannot use. */
  #anew(): void {
    delete this.#state.standalone;
    this.#save();
    this.#listenStandalone();
  }

  /** After a sleep, connections are dead and nobody has said so. */
  #cutSilent(ms = this.#silence): void {
    for (const line of this.#lines) if (line.position && Date.now() - line.heard >= ms) line.cut();
  }

  #fetch(method: string, sending?: Sending): Promise<Response> {
    return this.#page.outlived(request(method, this.#url, this.#options, this.#state, sending));
  }

  // Telling

  #trouble(who: unknown, cause?: unknown): void {
    if (this.#page.leaving) return;
    const line = who instanceof Line ? who : undefined;
    if (line?.over) this.#lines.delete(line);
    if (cause === undefined) this.#troubled.delete(who);
    else {
      this.#troubled.add(who);
      if (line) this.#trace('broken', line, cause);
      if (cause instanceof Unauthorized) this.#report(cause);
    }
    this.#setStatus();
  }

  #setStatus(): void {
    const status: Status = this.#closed
      ? 'disconnected'
      : this.#troubled.size
        ? 'reconnecting'
        : this.#ready
          ? 'connected'
          : 'connecting';
    if (status === this.#status) return;
    this.#status = status;
    this.#guard(() => this.#options.onstatus?.(status));
  }

  #trace(what: Trace['what'], line: Line, cause?: unknown): void {
    const { ontrace } = this.#options;
    if (!ontrace) return;
    const call = this.#shown(line);
    const { position } = line;
    this.#guard(() => ontrace({ what, cause, ...(call && { call }), ...(position !== undefined && { position }) }));
  }

  /** A page's callback that throws disturbs nobody but the page. */
  #guard(callback: () => void): void {
    try {
      callback();
    } catch (error) {
      this.#report(error);
    }
  }

  #report(error: unknown): void {
    this.onerror?.(error instanceof Error ? error : new Error(String(error)));
  }

  get #state(): State {
    return this.#keeper.state;
  }

  #save(): void {
    if (!this.#page.leaving) this.#keeper.save();
  }

  #keep(storage: KeyValue | undefined): Keeper {
    return new Keeper(storage, this.#options.key ?? `perdure:${this.#url}`, (error) => this.#report(error));
  }
}

const withParams = (params: unknown): { params?: Record<string, unknown> } =>
  params === undefined ? {} : { params: params as Record<string, unknown> };

/** Whether two handshakes make one client, as the server sees it: by version and capabilities. */
function agree(one: unknown, other: unknown): boolean {
  const seen = (params: unknown) => {
    const { protocolVersion, capabilities } = (params ?? {}) as Record<string, unknown>;
    return JSON.stringify([protocolVersion, capabilities]);
  };
  return seen(one) === seen(other);
}

/** Timers are slowed down in pages that nobody sees; messages are not. */
function nextTurn(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}

/** Looking at it throws where it is forbidden. */
function perTab(): KeyValue | undefined {
  try {
    return globalThis.sessionStorage;
  } catch {
    return undefined;
  }
}

function isShared(storage: KeyValue | null | undefined): boolean {
  try {
    return storage !== undefined && storage !== null && storage === globalThis.localStorage;
  } catch {
    return false;
  }
}
