/**
 * One page at a time per stored state. Duplicating a tab copies its session storage, and two pages with one session
 * would take each other's streams away; the copy finds the lock taken.
 */

/** A reloaded page may meet the lock of the document before it, which is about to go. */
export const PATIENCE = 1000;

/** A living page answers within a turn or two; a busy machine is given more. */
const ANSWER = 200;

export type Release = () => void;

/** Take the lock. Gives `undefined` if another page has it and does not let go. */
export function take(name: string, patience: number = PATIENCE): Promise<Release | undefined> {
  if (globalThis.navigator?.locks) return byLocks(name, patience);
  if (globalThis.BroadcastChannel) return byChannel(name, patience);
  return Promise.resolve(() => {});
}

function byLocks(name: string, patience: number): Promise<Release | undefined> {
  return new Promise((resolve) => {
    const signal = AbortSignal.timeout(patience);
    navigator.locks
      .request(name, { signal }, () => new Promise<void>((release) => resolve(release)))
      .catch(() => resolve(undefined));
  });
}

/** Web Locks need a secure context; without one, pages ask each other. */
export async function byChannel(name: string, patience: number): Promise<Release | undefined> {
  const channel = new BroadcastChannel(name);
  const mine = Math.random();
  let held = false;
  let taken = false;
  channel.onmessage = ({ data }: MessageEvent<{ ask?: number; held?: number }>) => {
    // Of two that ask at once, the smaller number wins.
    if (data.ask !== undefined && (held || mine < data.ask)) channel.postMessage({ held: data.ask });
    if (data.held === mine) taken = true;
  };
  const leave = () => channel.close();
  globalThis.addEventListener?.('pagehide', leave, { once: true });
  for (let waited = 0; waited <= patience && !held; waited += ANSWER) {
    taken = false;
    channel.postMessage({ ask: mine });
    await new Promise((resolve) => setTimeout(resolve, ANSWER));
    held = !taken;
  }
  if (held) return leave;
  leave();
  return undefined;
}
