// Writes values for people: spans, times, sizes, ids, and texts of which every character can be seen.

export const NONE = '–';

const SHORT = 8;

/** As much of an id as log records show of it: a whole one may be a secret. */
export const short = (id: string | null | undefined): string => (id ? id.slice(0, SHORT) : NONE);

/** As much of an id as an address carries: no other id begins so, and it opens no session. */
export const ADDRESS_CHARACTERS = 12;

/** A span in one unit, as `perdure sessions` writes it: a larger unit is used from two of it on. */
export function span(seconds: number): string {
  for (const [worth, unit] of [
    [86_400, 'd'],
    [3_600, 'h'],
    [60, 'm'],
  ] as const)
    if (seconds >= 2 * worth) return `${Math.floor(seconds / worth)}${unit}`;
  return `${Math.max(Math.floor(seconds), 0)}s`;
}

export function bytes(size: number | null | undefined): string {
  if (size === null || size === undefined) return NONE;
  let rest = size;
  for (const unit of ['B', 'KiB', 'MiB', 'GiB']) {
    if (rest < 1024) return `${unit === 'B' || rest >= 100 ? Math.round(rest) : rest.toFixed(1)} ${unit}`;
    rest /= 1024;
  }
  return `${rest.toFixed(1)} TiB`;
}

export const number = (value: number | null | undefined): string =>
  value === null || value === undefined ? NONE : value.toLocaleString('en-US');

/** A number for a plot: three digits that matter. */
export const figure = (value: number): string =>
  value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString('en-US') : value.toFixed(value < 10 ? 2 : 1).replace(/\.?0+$/, '');

export function duration(seconds: number): string {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${figure(seconds * 1000)} ms`;
  return seconds < 120 ? `${figure(seconds)} s` : span(seconds);
}

export const iso = (time: number): string => new Date(time * 1000).toISOString();

export const clock = (time: number): string => iso(time).slice(11, 23);

export const moment = (time: number): string => `${iso(time).slice(0, 10)} ${iso(time).slice(11, 19)}Z`;

// Characters that act instead of being seen, those that turn the direction of writing among them.
const UNSEEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

const escaped = (character: string): string => `\\u${character.charCodeAt(0).toString(16).padStart(4, '0')}`;

/** A text that may be anything, as one line. */
export const plain = (text: string): string => text.replace(UNSEEN, escaped).replaceAll('\n', '\\n');

/** The same for lines that stay lines. */
export const lines = (text: string): string => text.replace(UNSEEN, escaped);

export const plural = (count: number, what: string): string => `${number(count)} ${what}${count === 1 ? '' : 's'}`;
