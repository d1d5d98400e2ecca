/** The page that the transport lives in: it goes offline, to sleep, and away. */

/** There is no event for everything that may bring a network back. */
const LONG = 10_000;
/** How often to look for silence, at most. */
const TICK = 5000;
/** Timers that are set to more come at once. */
const LONGEST = 2 ** 31 - 1;

export interface Page {
  /** It goes: what becomes of its connections is the next page's affair. */
  leaving: boolean;
  /** Wait, or less if there is reason to hope. */
  pause(ms: number): Promise<void>;
  /** Wait while the browser is offline or the page away. */
  awake(): Promise<void>;
  begin(): void;
  /** Nobody waits here any more. */
  end(): void;
}

/** What the page is told: to look at its connections, which may be dead, all of them perhaps; or that there are none. */
export interface Watcher {
  look(dead?: boolean, restored?: boolean): void;
  offline(is: boolean): void;
}

export function watch(silence: number, { look, offline }: Watcher): Page {
  const wakers = new Set<() => void>();
  const ended = new AbortController();
  const { signal } = ended;
  const on = (name: string, then: (event: Event) => void) => addEventListener(name, then, { signal });
  let ticking: ReturnType<typeof setInterval>;
  const wake = (dead?: boolean, restored?: boolean) => {
    for (const done of wakers) done();
    look(dead, restored);
  };
  const page: Page = {
    leaving: false,
    begin() {
      ticking = setInterval(look, Math.min(TICK, silence / 3));
      on('offline', () => offline(true));
      on('online', () => {
        offline(false);
        wake(true);
      });
      on('visibilitychange', () => document.hidden || wake());
      on('pagehide', () => (page.leaving = true));
      on('pageshow', (event) => {
        page.leaving = false;
        if ((event as PageTransitionEvent).persisted) wake(true, true);
      });
    },
    pause: (ms) =>
      new Promise((resolve) => {
        const done = () => {
          clearTimeout(timer);
          wakers.delete(done);
          resolve();
        };
        const timer = setTimeout(done, Math.min(ms, LONGEST));
        wakers.add(done);
        if (signal.aborted) done();
      }),
    async awake() {
      while ((page.leaving || isOffline()) && !signal.aborted) await page.pause(LONG);
    },
    end() {
      ended.abort();
      clearInterval(ticking);
      for (const done of wakers) done();
    },
  };
  return page;
}

export const isOffline = (): boolean => navigator.onLine === false;
