/**
 * The page of the browser tests: the SDK's stock client on our transport. What it is shown goes into a record in session
 * storage at once, so that the record outlives the page as the test's tab does.
 */

import type { Client as Client2 } from '@modelcontextprotocol/client';
import { type Options, OutcomeUnknown, PerdureTransport, type RecoveredCall } from 'perdure';

type Shown = (string | number | null)[];

const query = new URLSearchParams(location.search);
const record: Shown[] = [];
let forbidden = false;

/** Each line has a place of its own in storage, so that showing one costs the same however many there are. */
const place = (number: number) => `record ${number}`;

function read(): void {
  try {
    for (let line; (line = sessionStorage.getItem(place(record.length))); ) record.push(JSON.parse(line) as Shown);
  } catch {
    forbidden = true;
  }
}

function show(...what: Shown): void {
  try {
    if (!forbidden) sessionStorage.setItem(place(record.length), JSON.stringify(what));
  } catch {
    forbidden = true;
  }
  record.push(what);
}

read();

const keyOf = (params: unknown): string => (params as { arguments: { key: string } }).arguments.key;

function code(error: unknown): Shown {
  const { code, message, name } = error as { code?: number; message: string; name: string };
  return [code ?? (error instanceof OutcomeUnknown ? -31001 : null), name === 'Error' ? message : `${name}: ${message}`];
}

const text = (result: unknown): string => (result as { content: { text: string }[] }).content[0]?.text ?? '';

function recovered(call: RecoveredCall): void {
  const key = keyOf(call.params);
  show('recovered', key);
  calls.set(key, call);
  call.onquestion = ({ method, params }) => {
    show('question', method, params?.['message'] as string);
    return { action: 'accept', content: { answer: 'forty-three' } };
  };
  call.onnotification = ({ method, params }) => {
    if (method === 'notifications/progress') show('progress', key, params?.['progress'] as number);
    else show('notification', key, method);
  };
  call.result.then(
    (result) => show('result', key, text(result)),
    (error) => show('error', key, ...code(error)),
  );
}

const LONG = 600_000;
const calls = new Map<string, RecoveredCall>();
const aborts = new Map<string, AbortController>();
let token = query.get('token') ?? '';
let listens = false;

const options: Options = {
  onstatus: (status) => show('status', status),
  ongap: ({ from, to, reason, call }) => show('gap', call ? keyOf(call.params) : '', from, to, reason),
  onlost: () => show('lost'),
  ontrace: ({ what, call }) => (listens ||= what === 'open' && !call),
};
if (query.has('token')) {
  options.token = ({ renew }) => {
    if (renew) token = localStorage.getItem('token') ?? '';
    show('asked', String(renew));
    if (!token) throw new Error('signed out');
    return token;
  };
}
if (query.get('recover') !== 'pending') options.onrecovered = recovered;
if (query.get('storage') === 'local') options.storage = localStorage;
if (query.get('storage') === 'none') options.storage = null;
if (query.has('streams')) options.streams = Number(query.get('streams'));
if (query.has('silence')) options.silence = Number(query.get('silence'));

if (query.has('twice')) {
  // As a framework does that mounts everything twice.
  const first = new PerdureTransport(query.get('url') ?? '');
  void first.start();
  void first.close();
}
const transport = new PerdureTransport(query.get('url') ?? '', options);

/** What a test does to the page. */
const lab = {
  record: () => record,
  session: () => transport.sessionId ?? null,
  status: () => transport.status,
  /** The standalone stream has been open in this page. */
  listens: () => listens,
  server: () => client.getServerVersion()?.name ?? null,
  version: () => client.getNegotiatedProtocolVersion() ?? null,
  capabilities: () => client.getServerCapabilities() ?? null,
  pending: () => transport.pending().map((call) => (recovered(call), keyOf(call.params))),
  positions: () => transport.positions,
  url: query.get('url'),
  has: (key: string) => calls.has(key),
  cancel: (key: string) => calls.get(key)?.cancel('enough'),
  /** As a page does that no longer wants what it asked for. */
  abort: (key: string) => aborts.get(key)?.abort('enough'),
  /** Take all the room that is left in storage, but so many characters. */
  fill(room = 0): void {
    sessionStorage.setItem('room', 'x'.repeat(room));
    for (let size = 4 << 20; size >= 1; size >>= 1) {
      try {
        sessionStorage.setItem(`filling ${size}`, 'x'.repeat(size));
      } catch {
        // It did not fit; less may.
      }
    }
    sessionStorage.removeItem('room');
  },
  empty(): void {
    for (const key of Object.keys(sessionStorage)) if (key.startsWith('filling')) sessionStorage.removeItem(key);
  },
  call(name: string, args: Record<string, unknown>, resumptionToken?: string): void {
    const key = args['key'] as string;
    const abort = new AbortController();
    aborts.set(key, abort);
    const onprogress = ({ progress }: { progress: number }) => show('progress', key, progress);
    const options = { onprogress, resumptionToken, signal: abort.signal, timeout: LONG };
    const rest = query.get('sdk') === '1' ? [undefined, options] : [options];
    client.callTool({ name, arguments: args }, ...(rest as [])).then(
      (result) => show('result', key, text(result)),
      (error) => show('error', key, ...code(error)),
    );
  },
  async ask(name: string, args: Record<string, unknown> = {}): Promise<string> {
    return text(await client.callTool({ name, arguments: args }));
  },
  /** A read: how many there are. */
  tools: async (): Promise<number> => (await client.listTools()).tools.length,
  /** Without sessions, a client says what it wants to hear of. */
  listen: async (filter: object): Promise<string> => JSON.stringify((await client.listen(filter)).honoredFilter),
  close: () => client.close(),
  end: () => transport.terminateSession(),
};

Object.assign(globalThis, { lab });

const { Client } =
  query.get('sdk') === '1'
    ? await import('@modelcontextprotocol/sdk/client/index.js')
    : await import('@modelcontextprotocol/client');
// `single`: the revision without sessions, where the server speaks it.
const versionNegotiation = query.has('single') ? { mode: 'auto' } : undefined;
const about = { capabilities: { elicitation: {} }, versionNegotiation };
const client = new Client({ name: 'page', version: '1' }, about as object) as Client2;
client.onerror = (error) => show('trouble', String(error));
client.fallbackNotificationHandler = async ({ method, params }) => {
  show('notice', method, ((params?.['uri'] as string | undefined) ?? null));
};

if (query.get('answer') !== 'none') {
  const handle = async (request: { params: { message: string } }) => {
    show('asked', request.params.message);
    return query.get('answer') === 'wait' && !localStorage.getItem('answer')
      ? new Promise<never>(() => {})
      : { action: 'accept' as const, content: { answer: 'forty-two' } };
  };
  if (query.get('sdk') !== '1') client.setRequestHandler('elicitation/create', handle as never);
}
client.connect(transport as never, { timeout: LONG }).then(
  () => show('ready', transport.sessionId ?? null),
  (error) => show('failed', String(error)),
);
