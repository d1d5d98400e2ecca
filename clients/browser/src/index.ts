export { type Notification, type Question, RecoveredCall } from './calls.js';
export { CallFailed, OutcomeUnknown, PerdureError, Refused, SessionLost, StorageFailed, Unauthorized } from './errors.js';
export type { KeyValue } from './state.js';
export type { Asked, Gap, Options, Status, Trace } from './options.js';
export { PerdureTransport } from './transport.js';
