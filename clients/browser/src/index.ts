export { type Notification, RecoveredCall } from './calls.js';
export { CallFailed, OutcomeUnknown, PerdureError, Refused, SessionLost, StorageFailed, Unauthorized } from './errors.js';
export type { KeyValue } from './state.js';
export { type Gap, type Options, PerdureTransport, type Status, type Trace } from './transport.js';
