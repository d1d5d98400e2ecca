// Says in few words what an MCP message is.
import { figure, plain } from './format.ts';

export interface Summary {
  /** What it is for the eye: each has a colour and a word. */
  is: 'progress' | 'notice' | 'ask' | 'answer' | 'error' | 'text';
  title: string;
  detail: string;
  /** 0 to 1, where a progress has a total. */
  share?: number;
}

type Members = Record<string, unknown>;

const members = (value: unknown): Members =>
  typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Members) : {};

/** Characters of a detail: a line shows fewer, and a payload may be megabytes. */
const DETAIL = 300;

function brief(value: unknown): string {
  const text = typeof value === 'string' ? value : (JSON.stringify(value) ?? '');
  return plain(text.slice(0, DETAIL));
}

export function summarize(message: unknown, { cut = false, final = false } = {}): Summary {
  if (typeof message === 'string') return { is: 'text', title: `${final ? 'answer: ' : ''}${cut ? 'large payload' : 'text'}`, detail: brief(message) };
  const { id, method, params, result, error } = members(message);
  if (typeof method === 'string') {
    if (method === 'notifications/progress') return progress(members(params));
    const { _meta: _, ...rest } = members(params);
    const detail = Object.keys(rest).length ? brief(rest) : '';
    return { is: id === undefined ? 'notice' : 'ask', title: brief(method.replace(/^notifications\//, '')), detail };
  }
  if (error !== undefined) {
    const { code, message: sentence } = members(error);
    return { is: 'error', title: `error ${brief(code)}`, detail: brief(sentence) };
  }
  if (result !== undefined) return answer(members(result), result);
  return { is: 'text', title: 'payload', detail: brief(message) };
}

function progress(params: Members): Summary {
  const { progress: done, total, message } = params;
  if (typeof done !== 'number') return { is: 'progress', title: 'progress', detail: brief(params) };
  const title = `progress ${figure(done)}${typeof total === 'number' ? ` of ${figure(total)}` : ''}`;
  const detail = typeof message === 'string' ? brief(message) : '';
  if (typeof total !== 'number' || total <= 0) return { is: 'progress', title, detail };
  return { is: 'progress', title, detail, share: Math.min(Math.max(done / total, 0), 1) };
}

function answer(result: Members, whole: unknown): Summary {
  const first = Array.isArray(result['content']) ? members(result['content'][0]) : {};
  const detail = typeof first['text'] === 'string' ? brief(first['text']) : brief(whole);
  return result['isError'] === true
    ? { is: 'error', title: 'answer: the tool failed', detail }
    : { is: 'answer', title: 'answer', detail };
}
