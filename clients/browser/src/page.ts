/** The page that the transport lives in: it goes offline, to sleep, and away. */

/** There is no event for everything that may bring a network back. */
const LONG = 10_000;

export class Page {
  /** It goes: what becomes of its connections is the next page's affair. */
  leaving = false;
  #wakers = new Set<() => void>();
  #end = new AbortController();

  /** `back`: there is reason to try again, or to distrust connections; `offline`: there is none. */
  constructor(back: (dead: boolean) => void, offline: (is: boolean) => void) {
    const { signal } = this.#end;
    const on = (name: string, then: (event: Event) => void, target: EventTarget | undefined = globalThis) =>
      target?.addEventListener?.(name, then, { signal });
    const wake = (dead: boolean) => {
      this.wake();
      back(dead);
    };
    on('offline', () => offline(true));
    on('online', () => {
      offline(false);
      wake(true);
    });
    on('visibilitychange', () => document.visibilityState === 'visible' && wake(false), globalThis.document);
    on('pagehide', () => (this.leaving = true));
    on('pageshow', (event) => {
      this.leaving = false;
      if ((event as PageTransitionEvent).persisted) wake(true);
    });
  }

  end(): void {
    this.#end.abort();
    this.wake();
  }

  wake(): void {
    for (const done of this.#wakers) done();
  }

  /** Wait, or less if there is reason to hope. */
  pause(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const done = () => {
        clearTimeout(timer);
        this.#wakers.delete(done);
        resolve();
      };
      const timer = setTimeout(done, ms);
      this.#wakers.add(done);
      if (this.#end.signal.aborted) done();
    });
  }

  async online(): Promise<void> {
    while (isOffline() && !this.#end.signal.aborted) await this.pause(LONG);
  }

  /** A page that goes loses its connections; nothing follows from that. */
  async outlived<T>(promise: Promise<T>): Promise<T> {
    try {
      return await promise;
    } catch (error) {
      if (this.leaving) await new Promise(() => {});
      throw error;
    }
  }
}

export const isOffline = (): boolean => globalThis.navigator?.onLine === false;
