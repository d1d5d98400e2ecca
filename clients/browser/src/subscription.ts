/**
 * Decides what is handed on of a `subscriptions/listen`, and whether it is sent again after an end.
 * `src/perdure/_core/listening.py` has the same rules with their reasons; `tests/vectors/listening.json` tests both.
 */

type Filter = Record<string, unknown>;

export type Cue = readonly [method: string, params: object];

export class Subscription {
  /** Ends in a row before which no change was notified: the pause before listening again grows with them. */
  barren = 0;
  /** What the server agreed to; undefined before the first acknowledgement. */
  private honored: Filter | undefined;

  /** The cues to hand on after a notification; undefined if the notification itself is not handed on. */
  heard(method: string, params: Record<string, unknown> = {}): Cue[] | undefined {
    if (method === 'notifications/cancelled') return undefined; // the end of the connection follows, and says the same
    if (method !== 'notifications/subscriptions/acknowledged') {
      this.barren = 0;
      return [];
    }
    const isBack = this.honored;
    const honored = (this.honored = (params['notifications'] ?? {}) as Filter);
    const cues: Cue[] = [];
    if (isBack) {
      for (const kind of ['tools', 'prompts', 'resources'])
        if (honored[`${kind}ListChanged`] === true) cues.push([`notifications/${kind}/list_changed`, {}]);
      const uris = honored['resourceSubscriptions'];
      for (const uri of Array.isArray(uris) ? uris : []) cues.push(['notifications/resources/updated', { uri }]);
    }
    return cues;
  }

  /** Whether to listen again after a pause. */
  ended(isError: boolean): boolean {
    return !isError && Object.keys(this.honored ?? {}).length > 0 && ++this.barren > 0;
  }
}
