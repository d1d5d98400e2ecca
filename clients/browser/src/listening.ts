/**
 * `subscriptions/listen` of 2026-07-28, over as many connections as it takes. The revision has no way to read a broken
 * subscription on, and a client cannot tell what it missed: so each thing that is listened to is told as changed when
 * the subscription is back, unless the server says where it was (`dev.perdure/position`) and tells what changed since.
 */

import { wait } from './backoff.js';
import type { Call } from './calls.js';
import { Sent } from './delivery.js';
import { ask } from './exchange.js';
import { route } from './incoming.js';
import type { Link } from './link.js';
import { message, type Message, meta, outgoing, type Request } from './wire.js';

const SUBSCRIPTION = 'io.modelcontextprotocol/subscriptionId';
const POSITION = 'dev.perdure/position';

/** JSON-RPC's code. */
const INVALID_PARAMS = -32602;

type Filter = Record<string, unknown> & { resourceSubscriptions?: unknown };

/** The answer to the request, once there is nothing to come back to. */
export async function listenTo(link: Link, it: Call, m: Request): Promise<Message> {
  const wire = outgoing(link.state.life, m);
  const sent: Record<string, unknown> = { ...meta(m) };
  const request = { ...wire, params: { ...wire.params, _meta: sent } };
  let honored: Filter | undefined;
  let attempt = 0;

  const hand = (method: string, params: object, _meta: object = {}) =>
    route(link, message({ method, params: { ...params, _meta: { ..._meta, [SUBSCRIPTION]: m.id } } }), it);

  const take = (told: Message) => {
    const { method = '', params } = told;
    if (method === 'notifications/cancelled') return; // the end of the connection follows, and says the same
    const was = sent[POSITION];
    sent[POSITION] = meta(told)?.[POSITION] ?? was;
    hand(method, params ?? {}, meta(told));
    if (method === 'notifications/subscriptions/acknowledged') {
      const isBack = !!honored && was === undefined;
      honored = (params?.['notifications'] ?? {}) as Filter;
      if (isBack) tellAll(honored, hand);
    } else if (method === 'notifications/perdure/gap') tellAll(honored, hand);
    else attempt = 0;
  };

  for (;;) {
    const answer = await ask(link, request, Sent.Read, { headers: it.kept.headers, call: it, attempts: Infinity, isCut: true, take });
    if (sent[POSITION] !== undefined && answer.error?.code === INVALID_PARAMS) {
      delete sent[POSITION]; // it means nothing to this server: without it, everything is told as changed
    } else if (answer.error || !honored) return answer;
    else await link.page.pause(wait(attempt++)); // a server that stops ends it in good order
    request.id += '+';
  }
}

/** Whatever is listened to may have changed. */
function tellAll(honored: Filter | undefined, hand: (method: string, params: object) => void): void {
  for (const kind of ['tools', 'prompts', 'resources'])
    if (honored?.[`${kind}ListChanged`]) hand(`notifications/${kind}/list_changed`, {});
  const uris = honored?.resourceSubscriptions;
  for (const uri of Array.isArray(uris) ? uris : []) hand('notifications/resources/updated', { uri });
}
