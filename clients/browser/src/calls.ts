/** Calls that were running when the page before this one went. */

import { CallFailed, OutcomeUnknown } from './errors.js';
import type { KeptCall } from './state.js';
import type { Message } from './wire.js';

/** A notification as it came. */
export interface Notification {
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
  /** The call's result as the server sent it; rejects with `CallFailed` or `OutcomeUnknown`. */
  readonly result: Promise<unknown>;
  settled = false;

  #resolve!: (result: unknown) => void;
  #reject!: (error: Error) => void;
  readonly #cancel: (reason?: string) => Promise<void>;

  constructor(kept: KeptCall, cancel: (reason?: string) => Promise<void>) {
    this.method = kept.method;
    this.params = kept.params;
    this.#cancel = cancel;
    this.result = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    this.result.catch(() => {}); // a page that does not ask is not told by the console either
  }

  /** Ask the server to stop it. The result then rejects with the server's word for that. */
  cancel(reason?: string): Promise<void> {
    return this.#cancel(reason);
  }

  /** @internal */
  answer(message: Message): void {
    this.settled = true;
    const { error } = message;
    if (error) this.#reject(new CallFailed(error.code, error.message, error.data));
    else this.#resolve(message.result);
  }

  /** @internal */
  fail(error: OutcomeUnknown): void {
    this.settled = true;
    this.#reject(error);
  }
}
