// @modelcontextprotocol/sdk 1.x under a rule of `answer_within`: lists the tools, so that it knows their schemas, calls one with a
// short timeout, and fetches the result as a model would. Arguments: the URL, and "reset" to let progress reset the timeout.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const [url, how] = process.argv.slice(2);
const client = new Client({ name: "stock-ts1", version: "1" });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
await client.listTools();
const options =
  how === "reset" ? { timeout: 2000, onprogress: () => {}, resetTimeoutOnProgress: true } : { timeout: 2000 };
const seconds = how === "reset" ? 4 : 3;
let result = await client.callTool({ name: "slow", arguments: { seconds } }, undefined, options);
const first = result.content[0].text;
for (let id; (id = result._meta?.["dev.perdure/call"]?.id); )
  result = await client.callTool({ name: "perdure_wait_for_result", arguments: { call: id } }, undefined, options);
process.stdout.write(JSON.stringify({ first, last: result.structuredContent }) + "\n");
await client.close();
