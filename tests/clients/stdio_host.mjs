// A host with the official TypeScript SDK's stdio transport, unchanged: it starts its server twice, and says what it saw.
// Usage: node stdio_host.mjs 1|2|'2 auto' COMMAND ARGUMENT…
const [, , generation, command, ...args] = process.argv;
const { Client } =
  generation === "1"
    ? await import("@modelcontextprotocol/sdk/client/index.js")
    : await import("@modelcontextprotocol/client");
const { StdioClientTransport } =
  generation === "1"
    ? await import("@modelcontextprotocol/sdk/client/stdio.js")
    : await import("@modelcontextprotocol/client/stdio");

for (let start = 0; start < 2; start++) {
  const client = new Client({ name: "stock", version: "1" }, {
    capabilities: {},
    ...(generation === "2 auto" && { versionNegotiation: { mode: "auto" } }),
  });
  await client.connect(new StdioClientTransport({ command, args, env: process.env, stderr: "ignore" }));
  const { tools } = await client.listTools();
  const progress = [];
  const gate = `${process.pid}.${start}`;
  // The tool goes on when all of it was seen: both SDKs lose progress that comes in one piece with the answer.
  const onprogress = (p) => {
    progress.push(p.progress);
    if (p.progress === 3) client.callTool({ name: "open_gate", arguments: { name: `${gate}/3` } });
  };
  const call = { name: "count", arguments: { n: 3, gate, pauses: [3] } };
  const options = { onprogress };
  const result =
    generation === "1" ? await client.callTool(call, undefined, options) : await client.callTool(call, options);
  console.log(JSON.stringify({ tools: tools.length, progress, text: result.content[0].text }));
  await client.close();
}
