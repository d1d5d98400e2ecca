/** What the page shows: cards, sums and a timeline. All of it is kept over a reload, in session storage. */

const KEPT = 'demo-2';
const MOST_LINES = 300;

type Outcome = 'running' | 'done' | 'failed';

interface LaneState {
  is: Outcome;
  seen: number;
  said: string;
}

interface CardState extends LaneState {
  key: number;
  loaves: number;
  position: string;
  /** What holds the bar up: no connection, or a run from the start that is not as far as the last one was. */
  held: '' | 'down' | 'again';
  /** The visitor has killed the server, and this call has not come back yet; or it has, and nothing new has come. */
  killed: '' | 'away' | 'back';
  reloads: number;
  cuts: number;
  kills: number;
  reruns: number;
  missed: number;
  stock: LaneState;
}

interface Line {
  at: number;
  is: string;
  what: string;
  where?: string;
}

const FAULTS = ['gaps', 'lost', 'twice'];
type Sum = 'events' | 'loads' | 'reconnects' | 'gaps' | 'lost' | 'twice';

interface Kept {
  next: number;
  cards: CardState[];
  lines: Line[];
  sums: Record<Sum, number>;
}

const nothing: Kept = {
  next: 1,
  cards: [],
  lines: [],
  sums: { events: 0, loads: 0, reconnects: 0, gaps: 0, lost: 0, twice: 0 },
};

function load(): Kept {
  try {
    return { ...nothing, ...(JSON.parse(sessionStorage.getItem(KEPT) ?? '{}') as Kept) };
  } catch {
    return nothing;
  }
}

const kept = load();

function save(): void {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    // Without storage the page shows what it sees, and forgets it at a reload.
  }
}

const get = (id: string): HTMLElement => document.getElementById(id) as HTMLElement;
const part = (of: Element, name: string): HTMLElement => of.querySelector(`.${name}`) as HTMLElement;

export const sums = {
  add(sum: Sum, by = 1): void {
    kept.sums[sum] += by;
    sums.show();
    save();
  },
  show(): void {
    for (const [sum, value] of Object.entries(kept.sums)) {
      get(sum).textContent = String(value);
      if (FAULTS.includes(sum)) get(sum).className = value > 0 ? 'bad' : kept.sums.events > 0 ? 'good' : '';
    }
  },
};

/** A line of the timeline, the newest on top. */
export function note(is: string, what: string, where?: string): void {
  const line: Line = { at: Date.now(), is, what, ...(where !== undefined && { where }) };
  kept.lines.push(line);
  kept.lines.splice(0, kept.lines.length - MOST_LINES);
  save();
  if (is !== 'event' && is !== 'missed') get('latest').textContent = what;
  get('timeline').prepend(drawn(line));
  while (get('timeline').childElementCount > MOST_LINES) get('timeline').lastElementChild?.remove();
}

function drawn({ at, is, what, where }: Line): HTMLLIElement {
  const item = document.createElement('li');
  item.dataset['is'] = is;
  const time = document.createElement('time');
  time.textContent = `${new Date(at).toTimeString().slice(0, 8)}.${Math.floor((at % 1000) / 100)}`;
  const box = document.createElement('div');
  box.append(span('what', what));
  if (where) box.append(span('where', where));
  item.append(time, box);
  return item;
}

function span(name: string, text: string): HTMLSpanElement {
  const it = document.createElement('span');
  it.className = name;
  it.textContent = text;
  return it;
}

const HELD = {
  '': '',
  down: 'no connection; it comes back by itself',
  again: 'running again from the start; what you have seen is not shown twice',
};

/** The generation in a position: it rises when another process takes the call over. */
const generationOf = (position: string): number => Number(position.split('.')[1] ?? 0);

/** One call. It counts what came, so that a loss or a repetition would show. */
export class Card {
  readonly #element: HTMLElement;
  readonly stock: StockLane;

  constructor(readonly state: CardState) {
    const template = get('call') as HTMLTemplateElement;
    this.#element = (template.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    this.stock = new StockLane(this, part(this.#element, 'stock'));
    get('calls').prepend(this.#element);
    cards.set(state.key, this);
    this.#draw();
    this.stock.draw();
  }

  get key(): number {
    return this.state.key;
  }

  progress(number: number, message = ''): void {
    const { seen } = this.state;
    if (number <= seen) sums.add('twice');
    if (number > seen + 1) sums.add('lost', number - seen - 1);
    this.#change({ seen: Math.max(seen, number), said: message, held: '' });
  }

  /** An event has come, and this is its position. */
  at(position: string, missed: boolean): void {
    this.#follow(position);
    if (position.includes('~')) return this.#change({ position }); // a place to come back to, and no message
    sums.add('events');
    this.#change({ position, missed: this.state.missed + Number(missed) });
    const number = Number.parseInt(position.split('.')[2] ?? '', 10); // the progress may follow it
    note(missed ? 'missed' : 'event', `call ${this.key}: event ${number}`, position);
  }

  /** Another process has taken the call over: it runs again. */
  #follow(position: string): void {
    const { position: before, is, killed, cuts, kills } = this.state;
    if (!before || is !== 'running' || generationOf(position) <= generationOf(before)) return;
    this.#change({ killed: '' });
    // A process may die without a click: what was taken for a cut was that.
    if (!killed) this.#change({ cuts: Math.max(0, cuts - 1), kills: kills + 1 });
    if (killed !== 'back') this.#again();
  }

  #again(): void {
    note('good', `call ${this.key} runs again from the start, because its process is gone`);
    this.#change({ held: 'again', reruns: this.state.reruns + 1 });
  }

  /** The visitor has killed the server. */
  killed(): void {
    if (this.state.is === 'running') this.#change({ killed: 'away', kills: this.state.kills + 1 });
  }

  /** Its connection is lost, or could not be made again. */
  broken(cause: unknown): void {
    if (this.state.is !== 'running' || this.state.held === 'down') return;
    note('loss', `call ${this.key} lost its connection`, String(cause));
    this.#change({ held: 'down', cuts: this.state.cuts + Number(this.state.killed !== 'away') });
  }

  connected(): void {
    if (this.state.held === 'down') this.#change({ held: '' });
    if (this.state.killed !== 'away') return;
    this.#change({ killed: 'back' });
    this.#again();
  }

  recovered(): void {
    note('good', `call ${this.key} goes on after a reload`);
    this.#change({ reloads: this.state.reloads + 1 });
  }

  done(said: string): void {
    if (this.state.seen < this.state.loaves) sums.add('lost', this.state.loaves - this.state.seen);
    note('good', `call ${this.key} has its result: ${said}`);
    this.#change({ is: 'done', said, held: '' });
  }

  failed(said: string): void {
    note('bad', `call ${this.key}: ${said}`);
    this.#change({ is: 'failed', said, held: '' });
  }

  remove(): void {
    this.#element.remove();
    cards.delete(this.key);
    kept.cards = kept.cards.filter((state) => state !== this.state);
    save();
  }

  #change(change: Partial<CardState>): void {
    Object.assign(this.state, change);
    save();
    this.#draw();
  }

  #draw(): void {
    const { key, loaves, position, held, reloads, cuts, kills, reruns, missed } = this.state;
    const element = this.#element;
    part(element, 'title').textContent = `Call ${key}`;
    part(element, 'place').hidden = !position;
    part(element, 'position').textContent = position;
    part(element, 'position').title = 'where a reader would go on';
    drawLane(part(element, 'ours'), `Call ${key}`, loaves, this.state, HELD[held]);
    part(element, 'ours').dataset['held'] = held;
    const chips = [
      times(reloads, 'reload'),
      times(cuts, 'cut'),
      times(kills, 'kill'),
      times(reruns, 're-run'),
      missed && `${missed} from the log`,
    ];
    part(element, 'chips').replaceChildren(...chips.flatMap((text) => (text ? [span('chip', text)] : [])));
    get('none').hidden = true;
  }
}

const times = (count: number, what: string): string => (count ? `${count} ${what}${count > 1 ? 's' : ''}` : '');

function drawLane(lane: HTMLElement, name: string, loaves: number, { is, seen, said }: LaneState, held = ''): void {
  lane.dataset['is'] = is;
  part(lane, 'share').textContent = `${seen} of ${loaves}`;
  part(lane, 'said').textContent = held || said;
  const bar = part(lane, 'bar');
  bar.setAttribute('aria-label', name);
  bar.setAttribute('aria-valuemax', String(loaves));
  bar.setAttribute('aria-valuenow', String(seen));
  (bar.firstElementChild as HTMLElement).style.width = `${(100 * seen) / loaves}%`;
}

/** The same call over the SDK's own transport. What it shows is what that transport's page would know. */
class StockLane {
  constructor(
    readonly card: Card,
    readonly element: HTMLElement,
  ) {}

  change(change: Partial<LaneState>): void {
    Object.assign(this.card.state.stock, change);
    save();
    this.draw();
  }

  draw(): void {
    const { key, loaves, stock } = this.card.state;
    drawLane(this.element, `Call ${key}, stock transport`, loaves, stock);
  }
}

export const cards = new Map<number, Card>();

export function newCard(loaves: number, key = kept.next): Card {
  kept.next = Math.max(kept.next, key) + 1;
  const state: CardState = {
    ...{ key, loaves, is: 'running', seen: 0, said: 'in the oven', position: '', held: '', killed: '' },
    ...{ reloads: 0, cuts: 0, kills: 0, reruns: 0, missed: 0 },
    stock: { is: 'running', seen: 0, said: 'in the oven' },
  };
  kept.cards.push(state);
  save();
  return new Card(state);
}

export const board = {
  /** Show what the page before has left. */
  opened(): void {
    for (const state of kept.cards) {
      const { stock } = new Card(state);
      if (state.stock.is === 'running') stock.change({ is: 'failed', said: 'gone with the page that made it' });
    }
    for (const line of kept.lines) get('timeline').prepend(drawn(line));
    note('page', kept.sums.loads ? 'the page was loaded again' : 'the page was loaded');
    sums.add('loads');
  },
  status(status: string): void {
    get('status').textContent = status;
    get('status').dataset['is'] = status;
    note(status === 'connected' ? 'good' : 'loss', status);
  },
  session(id: string): void {
    get('session').textContent = `${id.slice(0, 8)}…`;
    get('session').title = id;
  },
};

get('loaves').addEventListener('input', () => {
  get('count').textContent = (get('loaves') as HTMLInputElement).value;
});
get('details').addEventListener('click', () => {
  const shown = get('timeline').classList.toggle('detailed');
  get('details').setAttribute('aria-pressed', String(shown));
  get('details').textContent = shown ? 'Hide positions' : 'Show positions';
});
get('forget').addEventListener('click', () => {
  kept.lines = [];
  save();
  get('timeline').replaceChildren();
});
get('clear').addEventListener('click', () => {
  for (const card of [...cards.values()]) if (card.state.is !== 'running') card.remove();
  get('none').hidden = cards.size > 0;
});
