/** What the page shows: cards, sums and a timeline. All of it is kept over a reload, in session storage. */

const KEPT = 'demo';
const MOST_LINES = 300;

interface CardState {
  key: number;
  loaves: number;
  is: 'running' | 'done' | 'failed';
  seen: number;
  said: string;
  position: string;
  reloads: number;
  missed: number;
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

/** One call. It counts what came, so that a loss or a repetition would show. */
export class Card {
  readonly #element: HTMLElement;

  constructor(readonly state: CardState) {
    const template = get('call') as HTMLTemplateElement;
    this.#element = (template.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    get('calls').prepend(this.#element);
    cards.set(state.key, this);
    this.#draw();
  }

  get key(): number {
    return this.state.key;
  }

  progress(number: number, message = ''): void {
    const { seen } = this.state;
    if (number <= seen) sums.add('twice');
    if (number > seen + 1) sums.add('lost', number - seen - 1);
    this.#change({ seen: Math.max(seen, number), said: message });
  }

  /** An event has come, and this is its position. */
  at(position: string, missed: boolean): void {
    if (position.includes('~')) return this.#change({ position }); // a place to come back to, and no message
    sums.add('events');
    this.#change({ position, missed: this.state.missed + Number(missed) });
    const number = Number(position.split('.').at(-1));
    note(missed ? 'missed' : 'event', `call ${this.key}: event ${number}`, position);
  }

  recovered(): void {
    note('good', `call ${this.key} goes on after a reload`);
    this.#change({ reloads: this.state.reloads + 1 });
  }

  done(said: string): void {
    if (this.state.seen < this.state.loaves) sums.add('lost', this.state.loaves - this.state.seen);
    note('good', `call ${this.key} has its result: ${said}`);
    this.#change({ is: 'done', said });
  }

  failed(said: string): void {
    note('bad', `call ${this.key}: ${said}`);
    this.#change({ is: 'failed', said });
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
    const { key, loaves, seen, is, said, position, reloads, missed } = this.state;
    const element = this.#element;
    element.dataset['is'] = is;
    part(element, 'title').textContent = `Call ${key}`;
    part(element, 'share').textContent = `${seen} of ${loaves}`;
    part(element, 'said').textContent = said;
    part(element, 'position').textContent = position;
    part(element, 'position').title = 'position: where a reader would go on';
    const bar = part(element, 'bar');
    bar.setAttribute('aria-label', `Call ${key}`);
    bar.setAttribute('aria-valuemax', String(loaves));
    bar.setAttribute('aria-valuenow', String(seen));
    (bar.firstElementChild as HTMLElement).style.width = `${(100 * seen) / loaves}%`;
    const chips = [reloads && `${reloads} reload${reloads > 1 ? 's' : ''}`, missed && `${missed} from the log`];
    part(element, 'chips').replaceChildren(...chips.flatMap((text) => (text ? [span('chip', text)] : [])));
    get('none').hidden = true;
  }
}

export const cards = new Map<number, Card>();

export function newCard(loaves: number, key = kept.next): Card {
  kept.next = Math.max(kept.next, key) + 1;
  const state: CardState = { key, loaves, is: 'running', seen: 0, said: 'in the oven', position: '', reloads: 0, missed: 0 };
  kept.cards.push(state);
  save();
  return new Card(state);
}

export const board = {
  /** Show what the page before has left. */
  opened(): void {
    for (const state of kept.cards) new Card(state);
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
get('forget').addEventListener('click', () => {
  kept.lines = [];
  save();
  get('timeline').replaceChildren();
});
get('clear').addEventListener('click', () => {
  for (const card of [...cards.values()]) if (card.state.is !== 'running') card.remove();
  get('none').hidden = cards.size > 0;
});
