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

export class OutcomeUnknown extends PerdureError {
  readonly code = OUTCOME_UNKNOWN;
  readonly data: { outcome: 'unknown'; reason: string; method: string; name?: unknown };

  constructor(
    readonly method: string,
    readonly params: unknown,
    reason: string,
  ) {
    super(`Interrupted, outcome unknown: ${method} (${reason})`);
    this.data = { outcome: 'unknown', reason, method, name: (params as { name?: unknown } | undefined)?.name };
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
