/** Keeps one `subscriptions/listen` of 2026-07-28 open, over as many connections as it takes (`subscription.ts`). */

import { wait } from './backoff.js';
import type { Call } from './calls.js';
import { Sent } from './delivery.js';
import { ask } from './requests.js';
import { route } from './incoming.js';
import type { Link } from './link.js';
import { Subscription } from './subscription.js';
import { message, type Message, meta, outgoing, type Request } from './wire.js';

const SUBSCRIPTION = 'io.modelcontextprotocol/subscriptionId';

/** The answer to the request, once it is not sent again. */
export async function listenTo(link: Link, it: Call, m: Request): Promise<Message> {
  const request = outgoing(link.state.life, m);
  const subscription = new Subscription();

  const hand = (method: string, params: object, _meta: object = {}) =>
    route(link, message({ method, params: { ...params, _meta: { ..._meta, [SUBSCRIPTION]: m.id } } }), it);

  const take = (told: Message) => {
    const { method = '', params = {} } = told;
    const cues = subscription.heard(method, params);
    if (cues) hand(method, params, meta(told));
    for (const cue of cues ?? []) hand(...cue);
  };

  for (;;) {
    const answer = await ask(link, request, Sent.Read, { headers: it.kept.headers, call: it, attempts: Infinity, isCut: true, take });
    if (!subscription.ended(!!answer.error)) return answer;
    await link.page.pause(wait(subscription.barren - 1));
    request.id += '+';
  }
}
