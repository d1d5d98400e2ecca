/**
 * The page of `make demo`, and an example of how to use the transport: the MCP SDK's own client, one transport, and a
 * few callbacks. What the page shows is its own affair to keep; calls and positions are the transport's.
 */

import { Client } from '@modelcontextprotocol/client';
import { PerdureTransport, type RecoveredCall, type Trace } from 'perdure';
import { board, type Card, cards, newCard, note, sums } from './board.ts';
import { bakeStock } from './stock.ts';

const transport = new PerdureTransport('/mcp', {
  onstatus: board.status,
  onrecovered: goOn,
  ongap: ({ from, to, reason }) => {
    sums.add('gaps');
    note('gap', `events ${from} to ${to} are gone (${reason})`);
  },
  onlost: () => note('bad', 'the server no longer knows the session; a new one begins'),
  ontrace: trace,
});
const client = new Client({ name: 'demo page', version: '1' });
client.onerror = (error) => note('bad', error.message);

// The call's key goes along in `_meta`, so that a page after this one knows which of its cards the call is.
const keyOf = (params: unknown): number => (params as { _meta?: { key?: number } } | undefined)?._meta?.key ?? 0;

/** A call as one makes it with any transport. */
async function bake(loaves: number): Promise<void> {
  const card = newCard(loaves);
  void bakeStock(card, loaves);
  const call = { name: 'bake', arguments: { loaves }, _meta: { key: card.key } };
  try {
    const result = await client.callTool(call, {
      onprogress: ({ progress, message }) => card.progress(progress, message),
      timeout: 3_600_000,
    });
    card.done(textOf(result));
  } catch (error) {
    card.failed(String(error));
  }
}

/** A call of the page before this one: the rest of its reports, and its result. */
function goOn(call: RecoveredCall): void {
  const card = cards.get(keyOf(call.params)) ?? newCard(argumentsOf(call).loaves, keyOf(call.params));
  card.recovered();
  call.onnotification = ({ method, params }) => {
    if (method === 'notifications/progress') card.progress(params?.['progress'] as number, String(params?.['message']));
  };
  call.result.then(
    (result) => card.done(textOf(result)),
    (error) => card.failed(String(error)),
  );
}

const argumentsOf = (call: RecoveredCall) => (call.params as { arguments: { loaves: number } }).arguments;
const textOf = (result: unknown): string => (result as { content: { text: string }[] }).content[0]?.text ?? '';

/** Just connected: what comes this soon was waiting in the log. */
const AT_ONCE = 60;
const opened = new Map<Card | undefined, number>();
let isListening = false;

function trace({ what, call, position, cause }: Trace): void {
  const card = call && cards.get(keyOf(call.params));
  const whose = card ? `call ${card.key}` : 'the standalone stream';
  if (what === 'open' || what === 'turn') opened.set(card, performance.now());
  if (what === 'open') {
    if (card) card.connected();
    else isListening = true;
    if (position) sums.add('reconnects');
    note('good', `${position ? 'back on' : 'listening to'} ${whose}`, position);
  } else if (what === 'broken') {
    if (card) card.broken(cause);
    else if (isListening) note('loss', `${whose} lost its connection`, String(cause));
    if (!card) isListening = false;
  } else if (what === 'event' && card && position) {
    const missed = performance.now() - (opened.get(card) ?? Number.NEGATIVE_INFINITY) < AT_ONCE;
    card.at(position, missed);
  }
}

const button = (id: string) => document.getElementById(id) as HTMLButtonElement;

/** A button that asks the demo's own server for trouble. */
function trouble(id: string, words: string): void {
  button(id).addEventListener('click', async () => {
    button(id).disabled = true;
    note('loss', words);
    if (id === 'restart') for (const card of cards.values()) card.killed();
    await fetch(`/demo/${id}`, { method: 'POST', headers: { 'x-demo': 'yes' } }).catch(() => {});
    button(id).disabled = false;
  });
}

trouble('cut', 'you cut the connections');
trouble('restart', 'you kill the server');
button('reload').addEventListener('click', () => location.reload());
document.getElementById('bake')?.addEventListener('submit', (event) => {
  event.preventDefault();
  const loaves = Number((document.getElementById('loaves') as HTMLInputElement).value);
  const five = (event as SubmitEvent).submitter?.getAttribute('value') === 'five';
  for (let i = 0; i < (five ? 5 : 1); i++) void bake(loaves);
});

board.opened();
client.connect(transport).then(
  () => board.session(transport.sessionId ?? ''),
  (error) => note('bad', String(error)),
);
