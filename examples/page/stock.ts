/** The same calls to the server as the SDK serves it, over the transport that the SDK brings, for comparison. */

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';
import type { Card } from './board.ts';

/**
 * A browser has six connections for a host, and this transport holds one for each call. Under the machine's other name
 * it takes none from the page; beyond this number a call would wait for another one to end.
 */
const MOST = 5;
const there = new URL('/stock', location.href);
there.hostname = location.hostname === 'localhost' ? '127.0.0.1' : 'localhost';

let running = 0;
let leaving = false;
addEventListener('pagehide', () => (leaving = true));

/** A client and a session of its own for each call: what its transport reports is about this call. */
export async function bakeStock(card: Card, loaves: number): Promise<void> {
  if (running >= MOST) return card.stock.change({ is: 'failed', said: 'the browser has no connection left for it' });
  running++;
  const transport = new StreamableHTTPClientTransport(there);
  const client = new Client({ name: 'demo page, stock transport', version: '1' });
  try {
    await Promise.race([call(client, transport, card, loaves), gaveUp(client)]);
  } catch (error) {
    // A page that is left loses its connections as well: that is for the next one to say.
    if (!leaving) card.stock.change({ is: 'failed', said: error instanceof Error ? error.message : String(error) });
  } finally {
    running--;
    void client.close();
  }
}

async function call(client: Client, transport: StreamableHTTPClientTransport, card: Card, loaves: number): Promise<void> {
  await client.connect(transport);
  const result = await client.callTool(
    { name: 'bake', arguments: { loaves } },
    {
      onprogress: ({ progress, message }) => card.stock.change({ seen: progress, said: message ?? '' }),
      timeout: 3_600_000,
    },
  );
  const [content] = result.content as { text: string }[];
  card.stock.change({ is: 'done', said: content?.text ?? '' });
}

/** A call whose transport has given up waits for its own timeout. The page does not: it says so at once. */
function gaveUp(client: Client): Promise<never> {
  return new Promise((_, reject) => {
    client.onerror = (error) => {
      // The stock server gives no positions, so its transport does not come back.
      if (/stream disconnected/i.test(error.message)) reject(new Error('lost with its connection'));
      if (/maximum reconnection attempts/i.test(error.message)) reject(new Error('its transport gave up reconnecting'));
    };
  });
}
