/** Milliseconds before the n-th attempt in a row (from 0) after a loss. */

export const FIRST_WAIT = 1000;
export const LONGEST_WAIT = 30_000;

/**
 * The first attempt comes when the server asked for it; then the wait doubles, up to 30 s, and half of it is left to
 * chance, so that the pages of a server that was restarted do not come back all at once.
 */
export function wait(attempt: number, first: number = FIRST_WAIT, random: number = Math.random()): number {
  if (!attempt) return first;
  const most = Math.max(first, Math.min(LONGEST_WAIT, (first + 250) * 2 ** attempt));
  return (most / 2) * (1 + random);
}
