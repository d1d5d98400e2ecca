// A TypeScript client that was reloaded: it reattaches to a session, and cancels the first call that it is told it lost.
// What it hears is printed as JSON lines. Arguments: 1 or 2 (the SDK's version), URL, session id.
const [, , version, url, session] = process.argv;
const sdk = "@modelcontextprotocol/sdk/client";
const { Client, StreamableHTTPClientTransport } =
  version === "1"
    ? { ...(await import(`${sdk}/index.js`)), ...(await import(`${sdk}/streamableHttp.js`)) }
    : await import("@modelcontextprotocol/client");

const client = new Client({ name: "reloaded", version: "1" }, { capabilities: {} });
client.onerror = (error) => console.log(JSON.stringify({ error: String(error) }));
client.fallbackNotificationHandler = async ({ method, params }) => {
  console.log(JSON.stringify({ method, params }));
  if (params.state === "running")
    await client.notification({ method: "notifications/cancelled", params: { requestId: params.call } });
  if (params.state === "ended") process.exit(0);
};
const requestInit = { headers: { "X-MCP-Reconnect-Session": session } };
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit }));
