/**
 * What can go wrong, by what a page wants to catch:
 *
 *     PerdureError
 *     ├── OutcomeUnknown    a request may have run, and its answer cannot be had any more
 *     │   └── SessionLost   because the server no longer knows the session
 *     ├── CallFailed        the server's own error response to a recovered call
 *     ├── Refused           an HTTP status that settles the matter
 *     │   └── Unauthorized  401, also with a fresh token; or there was no token to be had
 *     └── StorageFailed     web storage is full or forbidden; everything goes on, but a reload will not find it
 */

export class PerdureError extends Error {}

/** The code that a Perdure server gives such a request itself. */
export const OUTCOME_UNKNOWN = -31001;

const HINT = 'After a crash Perdure runs a tool again only with the hint readOnlyHint or idempotentHint, or the meta dev.perdure/resumable.';
const SEE = 'https://perdure.example/docs/errors.html#interrupted-outcome-unknown';

/** Characters of a name in the message. */
const NAME_SHOWN = 100;

/** Its message is for the model, in the words of the server; `data.hint` is for the tool's author. */
export class OutcomeUnknown extends PerdureError {
  readonly code = OUTCOME_UNKNOWN;
  readonly data: { outcome: 'unknown'; reason: string; method: string; name?: string; hint: string; see: string };

  constructor(
    readonly method: string,
    readonly params: unknown,
    reason: string,
  ) {
    const { name: named, uri } = (params ?? {}) as { name?: unknown; uri?: unknown };
    const name = named ?? uri;
    const isNamed = typeof name === 'string';
    // Characters, as in Python: a surrogate pair is one.
    const shown = [...(isNamed ? name : method)].slice(0, NAME_SHOWN).join('');
    super(
      `Interrupted, outcome unknown: the answer to "${shown}" is lost, and nobody knows whether it took effect. ` +
        'Do not call it again before you have checked what happened; if you cannot check, ask the user.',
    );
    this.data = { outcome: 'unknown', reason, method, ...(isNamed && { name }), hint: HINT, see: SEE };
  }
}

export class SessionLost extends OutcomeUnknown {}

export class CallFailed extends PerdureError {
  constructor(
    readonly code: number,
    message: string,
    readonly data?: unknown,
  ) {
    super(message);
  }
}

export class Refused extends PerdureError {
  constructor(
    readonly status: number,
    readonly body: string,
    /** When to come back, in milliseconds, if the server has said so. */
    readonly after?: number,
  ) {
    super(`HTTP ${status}: ${body.slice(0, 200)}`);
  }
}

export class Unauthorized extends Refused {}

export class StorageFailed extends PerdureError {}
