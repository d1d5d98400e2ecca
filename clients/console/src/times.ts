// Elements that show how long ago something was, by the server's clock, and move with it.
import { h, say } from './dom.ts';
import { moment, span } from './format.ts';

let offset = 0;

/** The server's time, as its last answer and the time since then tell. */
export const now = (): number => performance.now() / 1000 + offset;

export function setNow(time: number): void {
  offset = time - performance.now() / 1000;
}

/** An element that says how long ago that was. */
export function ago(time: number, suffix = ''): HTMLTimeElement {
  const element = h('time', { 'data-suffix': suffix });
  setAgo(element, time);
  return element;
}

export function setAgo(element: HTMLTimeElement, time: number): void {
  if (element.dataset['at'] === String(time)) return;
  element.dataset['at'] = String(time);
  element.dateTime = new Date(time * 1000).toISOString();
  element.title = moment(time);
  write(element);
}

function write(element: HTMLTimeElement): void {
  say(element, span(now() - Number(element.dataset['at'])) + (element.dataset['suffix'] ?? ''));
}

export function moveTimes(): void {
  for (const element of document.querySelectorAll<HTMLTimeElement>('time[data-at]')) write(element);
}
