/** The lock for pages that are no secure context. */

import type { Release } from './lock.js';

/** A living page answers within a turn or two; a busy machine is given more. */
const ANSWER = 200;

/** Ask the other pages; the page that has it answers. */
export async function ask(name: string, patience: number): Promise<Release | undefined> {
  if (!globalThis.BroadcastChannel) return () => {};
  const channel = new BroadcastChannel(name);
  const mine = Math.random();
  let held = false;
  let taken = false;
  let away = false;
  channel.onmessage = ({ data }: MessageEvent<{ ask?: number; held?: number }>) => {
    // Of two that ask at once, the smaller number wins.
    if (data.ask !== undefined && !away && (held || mine < data.ask)) channel.postMessage({ held: data.ask });
    if (data.held === mine) taken = true;
  };
  // A page that goes has nothing to say any more, unless it comes back from the browser's cache.
  globalThis.addEventListener?.('pagehide', () => (away = true));
  globalThis.addEventListener?.('pageshow', () => (away = false));
  for (let waited = 0; waited <= patience && !held; waited += ANSWER) {
    taken = false;
    channel.postMessage({ ask: mine });
    await new Promise((resolve) => setTimeout(resolve, ANSWER));
    held = !taken;
  }
  if (held) return () => channel.close();
  channel.close();
  return undefined;
}
