/**
 * One page at a time per stored state. Duplicating a tab copies its session storage, and two pages with one session
 * would take each other's streams away; the copy finds the lock taken.
 */

import type { Link } from './link.js';
import { load, type State } from './state.js';
import { tried } from './tried.js';

/** A reloaded page may meet the lock of the document before it, which is about to go. */
const PATIENCE = 1000;

export type Release = () => void;

/** The state that a page has left here, if no other page has it: a duplicated tab begins with one of its own. */
export async function claim(link: Link): Promise<State> {
  const { key, storage, state } = link;
  const found = load(link);
  const isShared = !!storage && storage === tried(() => localStorage);
  const name = ({ tab }: State) => (isShared ? key : `${key}#${tab}`);
  link.release = await take(name(found ?? state));
  if (link.release) return found ?? state;
  if (isShared) link.storage = undefined;
  else link.release = await take(name(state));
  return state;
}

/** Take the lock. Gives `undefined` if another page has it and does not let go. */
async function take(name: string): Promise<Release | undefined> {
  const locks = navigator.locks as LockManager | undefined;
  // Web Locks need a secure context; without one, pages ask each other. Few pages need that code.
  if (!locks) return (await import('./asking.js')).ask(name, PATIENCE);
  return new Promise((resolve) => {
    const signal = AbortSignal.timeout(PATIENCE);
    locks
      .request(name, { signal }, () => new Promise<void>((release) => resolve(release)))
      .catch(() => resolve(undefined));
  });
}
