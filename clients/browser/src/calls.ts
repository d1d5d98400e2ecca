/** Requests that wait for their answers: of this page, and of those before it. */

import { CallFailed, OutcomeUnknown } from './errors.js';
import { guard, type Link } from './link.js';
import type { Line } from './lines.js';
import type { Asked } from './options.js';
import type { KeptCall } from './state.js';
import { message, type Message } from './wire.js';

/** JSON-RPC's code for what has none of its own. */
const INTERNAL_ERROR = -32603;

/** A notification as it came. */
export interface Notification {
  readonly method: string;
  readonly params?: Record<string, unknown>;
}

export interface Call {
  /** On the wire. */
  readonly id: string;
  readonly kept: KeptCall;
  /** It was made by a page before this one, or by the transport itself. */
  readonly recovered?: RecoveredCall | undefined;
  readonly onposition?: ((position: string) => void) | undefined;
  line?: Line;
  /** Send it once more. */
  again?: (() => Promise<void>) | undefined;
  /** It is on its way again, on this page. */
  goes?: boolean;
  /** What became of its task: the last progress, and the questions that have answers. */
  progress?: number;
  readonly answered?: Set<string>;
}

/** What a server asks while a call runs. */
export interface Question {
  readonly method: string;
  readonly params?: Record<string, unknown>;
}

/** A call of a page before this one. */
export class RecoveredCall {
  /** What was asked for; `params` are missing if they did not fit into web storage. */
  readonly method: string;
  readonly params: unknown;
  /** Is given the call's remaining notifications, each once and in order. Set it before you wait. */
  onnotification: ((notification: Notification) => void) | undefined;
  /**
   * Answers what the server asks while the call runs, where there is no session (2026-07-28): the client's own handlers
   * are for its own calls there. Until it is set, questions wait.
   */
  onquestion: ((question: Question) => unknown) | undefined;
  /** The call's result as the server sent it; rejects with `CallFailed` or `OutcomeUnknown`. */
  readonly result: Promise<unknown>;
  /** Ask the server to stop it. The result then rejects with the server's word for that. */
  readonly cancel: (reason?: string) => Promise<void>;
  settled = false;
  /** @internal */
  settle!: (result: unknown) => void;

  /** @internal */
  constructor({ method, params }: KeptCall, cancel: (reason?: string) => Promise<void>) {
    this.method = method;
    this.params = params;
    this.cancel = cancel;
    this.result = new Promise((resolve, reject) => {
      this.settle = (result) => {
        this.settled = true;
        (result instanceof Error ? reject : resolve)(result);
      };
    });
    this.result.catch(() => {}); // a page that does not ask is not told by the console either
  }
}

/** The server's answer. */
export function answer(link: Link, call: Call, m: Message): void {
  const { recovered, kept } = call;
  const { error } = m;
  if (!forget(link, call)) return; // the client gave it up
  link.recovered.delete(call);
  if (!recovered) return guard(link, link.hand, { ...m, id: kept.id });
  recovered.settle(error ? new CallFailed(error.code, error.message, error.data) : m.result);
}

/** It ends without the server's answer. */
export function settle(link: Link, call: Call, error: Partial<OutcomeUnknown> & Error): void {
  const { kept, recovered } = call;
  const { code = INTERNAL_ERROR, message: text, data } = error;
  if (!forget(link, call)) return;
  if (recovered) recovered.settle(error);
  else guard(link, link.hand, message({ id: kept.id, error: { code, message: text, data } }));
}

export const unknown = ({ method, params }: Asked, reason: string, Unknown = OutcomeUnknown): OutcomeUnknown =>
  new Unknown(method, params, reason);

/** Its answer had begun, and there is no way back to it. Reading once more does no harm. */
export function giveUp(link: Link, call: Call, reason: string): void {
  const { again } = call;
  delete call.again;
  if (again) again().catch((error) => settle(link, call, error));
  else settle(link, call, unknown(call.kept, reason));
}

/** Whether it was still running. */
export function forget({ running, state }: Link, call: Call): boolean {
  call.line?.end();
  if (!call.kept.cancelled) delete state.calls[call.id];
  return running.delete(call.id);
}

export const tell = (link: Link, { recovered }: Call, m: Message): void =>
  guard(link, recovered?.onnotification, m as Notification);
