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

export const isRequest = (m: Message): m is Message & { id: Id; method: string } =>
  m.method !== undefined && m.id !== undefined;

export const isResponse = (m: Message): m is Message & { id: Id } => m.method === undefined && m.id !== undefined;

const meta = (m: Message): Record<string, unknown> | undefined =>
  m.params?.['_meta'] as Record<string, unknown> | undefined;

export const tokenOf = (m: Message): Id | undefined => meta(m)?.['progressToken'] as Id | undefined;

/**
 * The ids of one life of the page. The SDK's client counts from 0 again after each reload, while calls of the life
 * before still run: so each life has a number, which stands in front of its ids on the wire.
 */
export class Ids {
  constructor(readonly life: number) {}

  /** Give a message of the client's the ids that it has on the wire. */
  out(m: Message): Message {
    if (m.method === 'notifications/cancelled' && m.params?.['requestId'] !== undefined)
      return { ...m, params: { ...m.params, requestId: this.wire(m.params['requestId'] as Id) } };
    if (!isRequest(m)) return m;
    const out: Message = { ...m, id: this.wire(m.id) };
    if (tokenOf(m) !== undefined) out.params = { ...m.params, _meta: { ...meta(m), progressToken: out.id } };
    return out;
  }

  wire(id: Id): string {
    return `${this.life}-${typeof id === 'number' ? id : JSON.stringify(id)}`;
  }
}

/** A progress report of a call, as the client that made the call knows it. */
export const withToken = (m: Message, token: Id): Message => ({ ...m, params: { ...m.params, progressToken: token } });

/** Requests that a new page simply makes again. The others are kept for it. */
const MADE_AGAIN = /^(initialize|ping|completion\/complete|logging\/setLevel)$|\/(list|subscribe|unsubscribe)$/;

export const isKept = (method: string): boolean => !MADE_AGAIN.test(method);

/** May be sent twice: reading again does no harm. */
export const isRepeatable = (method: string): boolean => MADE_AGAIN.test(method) || /\/(read|get)$/.test(method);
