// It is a transport of both SDKs, as a user types it; `npm run check` reads this file, nobody runs it.
import { Client as Client1 } from '@modelcontextprotocol/sdk/client/index.js';
import { Client as Client2 } from '@modelcontextprotocol/client';
import { PerdureTransport } from '../src/index.ts';

export async function connect(): Promise<void> {
  const info = { name: 'types', version: '1' };
  await new Client1(info).connect(new PerdureTransport('/mcp', { key: 'one' }));
  await new Client2(info).connect(new PerdureTransport('/mcp', { key: 'two' }));
}
