/** JSON-RPC as it is on the wire, and the ids on it. */

export type Id = string | number;

export interface Message {
  jsonrpc: '2.0';
  id?: Id;
  method?: string;
  params?: Record<string, unknown>;
  result?: unknown;
  error?: { code: number; message: string; data?: unknown };
}

export type Request = Message & { id: Id; method: string };

/** What each request of 2026-07-28 says in `_meta`: of itself, and who sends it. */
const IO = 'io.modelcontextprotocol/';
export const VERSION = `${IO}protocolVersion`;
export const CAPABILITIES = `${IO}clientCapabilities`;

/** A message of the revision without sessions: it says its version itself. */
export const isModern = (m: Message): boolean => typeof meta(m)?.[VERSION] === 'string';

/** The revision without sessions, or one after it. */
export const isSessionless = (version: string): boolean => version >= '2026-07-28';

/** What every request says in `_meta`. */
export const envelopeOf = (m: Message): Record<string, unknown> =>
  Object.fromEntries(Object.entries(meta(m) ?? {}).filter(([name]) => name.startsWith(IO)));

export const isRequest = (m: Message): m is Request => !!m.method && m.id !== undefined;

/** An answer without an id is an error, if it is one: the server could not read the request's. */
export const isResponse = (m: Message): m is Message & { id: Id } => !m.method && (m.id != null || !!m.error);

export const message = (m: Omit<Message, 'jsonrpc'>): Message => ({ jsonrpc: '2.0', ...m });

export const meta = (m: Message): Record<string, unknown> | undefined =>
  m.params?.['_meta'] as Record<string, unknown> | undefined;

export const tokenOf = (m: Message): Id | undefined => meta(m)?.['progressToken'] as Id | undefined;

/**
 * An id on the wire. The SDK's client counts from 0 again after each reload, while calls of the life before still run:
 * so each life of the page has a number, which stands in front of its ids.
 */
export const wireId = (life: number, id: Id): string => `${life}-${JSON.stringify(id)}`;

/** A request of the client's with the ids that it has on the wire. */
export function outgoing(life: number, m: Request): Request & { id: string } {
  const id = wireId(life, m.id);
  const params = tokenOf(m) === undefined ? {} : { params: { ...m.params, _meta: { ...meta(m), progressToken: id } } };
  return { ...m, ...params, id };
}

/** Requests that a new page simply makes again. The others are kept for it. */
const MADE_AGAIN =
  /^(initialize|ping|completion\/complete|logging\/setLevel|resources\/(templates\/list|(un)?subscribe)|(tool|prompt|resource)s\/list)$/;

export const isKept = (method: string): boolean => !MADE_AGAIN.test(method);

/** May be sent twice, because reading again does no harm: the list of the server and of the Python clients. */
export const isRepeatable = (method: string): boolean => !isKept(method) || method === 'resources/read' || method === 'prompts/get';
