/**
 * One page at a time per stored state. Duplicating a tab copies its session storage, and two pages with one session
 * would take each other's streams away; the copy finds the lock taken.
 */

/** A reloaded page may meet the lock of the document before it, which is about to go. */
export const PATIENCE = 1000;

export type Release = () => void;

/** Take the lock. Gives `undefined` if another page has it and does not let go. */
export async function take(name: string, patience: number = PATIENCE): Promise<Release | undefined> {
  const locks = globalThis.navigator?.locks;
  // Web Locks need a secure context; without one, pages ask each other. Few pages need that code.
  if (!locks) return (await import('./asking.js')).ask(name, patience);
  return new Promise((resolve) => {
    const signal = AbortSignal.timeout(patience);
    locks
      .request(name, { signal }, () => new Promise<void>((release) => resolve(release)))
      .catch(() => resolve(undefined));
  });
}
