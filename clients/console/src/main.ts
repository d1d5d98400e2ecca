// Starts the console's page: its frame, its connection to the console, and the page that the address names.
import { api, enter, type Seen, type StoreFacts } from './api.ts';
import { h, mark, one, replace, say } from './dom.ts';
import { Feed, SILENCE, troubleOf, type Trouble } from './feed.ts';
import { clock, plain } from './format.ts';
import { Overview } from './overview.ts';
import { Rates } from './rates.ts';
import { SessionView } from './session.ts';
import { Sessions } from './sessions.ts';
import { moveTimes, now, setNow } from './times.ts';
import { routeOf, type Route, type Shell, type View } from './view.ts';

const WORDS: Readonly<Record<Trouble['where'], string>> = {
  console: 'The connection to the console is lost; this page connects again by itself.',
  store: 'The store cannot be read; the console tries again.',
  token: 'This page has no access. Open the newest address that “perdure console” has printed, or give its token.',
  gone: '',
  asked: '',
};

class Frame implements Shell {
  readonly rates = new Rates();
  facts: StoreFacts | null = null;
  private readonly main = one<HTMLElement>('#main');
  private readonly banner = one('#banner');
  private readonly status = one('#status');
  private readonly feed: Feed;
  private view: View | null = null;
  private key = '';
  private hash = '';
  private readonly left = new Map<string, { view: View; hash: string; scroll: number }>();
  private trouble: Trouble['where'] | null = null;
  private isDegraded = false;

  constructor() {
    const listener = { onSeen: (seen: Seen) => this.onSeen(seen), onOpen: () => {}, onTrouble: (trouble: Trouble) => this.onTrouble(trouble) };
    this.feed = new Feed(api.live, listener, SILENCE);
    window.addEventListener('hashchange', () => this.go(true));
    document.addEventListener('visibilitychange', () => this.pause(document.hidden));
    window.addEventListener('online', () => this.hurry());
    one('.skip').addEventListener('click', (event) => {
      event.preventDefault();
      this.main.focus();
    });
    window.setInterval(moveTimes, 1_000);
  }

  async start(): Promise<void> {
    const given = new URLSearchParams(location.search).get('token');
    if (given !== null) {
      history.replaceState(null, '', `/${location.hash}`);
      await enter(given).catch(() => {}); // what is wrong with it is told by the first request
    }
    this.go(false);
    this.feed.open();
    void this.refreshFacts().catch(() => {});
  }

  // The address

  private go(isStep: boolean): void {
    const route = routeOf(location.hash);
    const key = `${route.page} ${route.id}`;
    if (key !== this.key || !this.view) {
      this.leave();
      const left = this.left.get(key);
      this.key = key;
      this.view = left?.view ?? this.make(route);
      this.view.show(route);
      replace(this.main, this.view.element);
      if (isStep) one<HTMLElement>('h1', this.main).focus({ preventScroll: true });
      if (isStep) window.scrollTo(0, left?.hash === location.hash ? left.scroll : 0);
    } else this.view.show(route);
    this.hash = location.hash;
    document.title = `${this.view.title} · Perdure console`;
    for (const link of document.querySelectorAll<HTMLElement>('nav [data-page]')) {
      const isHere = link.dataset['page'] === route.page;
      mark(link, 'aria-current', isHere ? 'page' : null);
    }
  }

  /** A list stays as it was left, so that the way back leads to the same place in it. */
  private leave(): void {
    if (!this.view) return;
    this.view.close();
    if (!(this.view instanceof SessionView)) this.left.set(this.key, { view: this.view, hash: this.hash, scroll: window.scrollY });
  }

  private make({ page, id }: Route): View {
    if (page === 'session') return new SessionView(this, id);
    return page === 'sessions' ? new Sessions(this) : new Overview(this);
  }

  // The connection

  private onSeen(seen: Seen): void {
    if (seen.what === 'lost') return this.onTrouble({ where: 'store', sentence: seen.error });
    if (seen.what === 'changed') return this.view?.refresh();
    if (seen.what !== 'tick') return;
    setNow(seen.time);
    this.rates.add(seen);
    this.isDegraded = seen.degraded === true;
    this.onTrouble(null);
    // While the store fails nothing in it changes, so no list says that it should be read again.
    if (this.facts && this.facts.degraded !== seen.degraded) this.back();
    this.view?.onTick(seen);
  }

  onTrouble(trouble: Trouble | null): void {
    const before = this.trouble;
    this.trouble = trouble?.where ?? null;
    const [word, tone] = trouble ? (trouble.where === 'token' ? ['no access', 'bad'] : ['reconnecting', 'warn']) : this.isDegraded ? ['store degraded', 'bad'] : ['live', 'good'];
    say(this.status, word);
    mark(this.status, 'data-is', tone);
    mark(document.body, 'data-stale', trouble ? (this.facts ? 'figures' : 'nothing') : null);
    if (!trouble) {
      replace(this.banner);
      if (before) this.back();
    } else if (before !== trouble.where) this.warn(trouble);
  }

  private warn({ where, sentence }: Trouble): void {
    const since = this.facts ? `What is shown is as of ${clock(now()).slice(0, 8)}.` : '';
    const detail = where === 'token' ? '' : plain(sentence).replace(/[^.!?]$/, '$&.');
    const way = where === 'token' ? this.entry() : h('button', { type: 'button', click: () => this.hurry() }, 'Try now');
    replace(this.banner, h('div', { class: 'banner', 'data-is': where }, h('p', {}, h('b', {}, WORDS[where]), ' ', detail, ' ', since), way));
  }

  /** A field for the token. */
  private entry(): HTMLElement {
    const field = h('input', { type: 'password', autocomplete: 'off', required: true, 'aria-label': 'Token' });
    const submit = (event: Event): void => {
      event.preventDefault();
      enter(field.value.trim()).then(
        () => this.hurry(),
        (error: unknown) => {
          field.value = '';
          field.setAttribute('placeholder', troubleOf(error).where === 'token' ? 'it is wrong' : 'no answer');
        },
      );
    };
    return h('form', { submit }, field, ' ', h('button', {}, 'Enter'));
  }

  /** Everything may have changed meanwhile. */
  private back(): void {
    void this.refreshFacts().catch(() => {});
    this.view?.refresh();
  }

  private hurry(): void {
    this.feed.hurry();
    this.view?.pause(false);
  }

  private pause(isHidden: boolean): void {
    if (!isHidden) {
      this.hurry();
      return this.view?.refresh();
    }
    this.feed.close();
    this.view?.pause(true);
  }

  async refreshFacts(): Promise<void> {
    const facts = await api.store();
    this.facts = facts;
    setNow(facts.now);
    say(one('#store'), plain(facts.store));
    say(one('#version'), `Perdure ${plain(facts.version)}.`);
    say(one('#rights'), facts.allow_end ? ' and may end sessions' : ' and changes nothing');
  }
}

void new Frame().start();
