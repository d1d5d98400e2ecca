// @modelcontextprotocol/ext-tasks on @modelcontextprotocol/client 2.x, as it speaks to a session (see stock.py).
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { createTaskSessionFromClient, resultFromTaskOutcome } from "@modelcontextprotocol/ext-tasks/client";
import { drive, say } from "./drive.mjs";

const client = new Client(
  { name: "stock-ext-tasks", version: "1" },
  { capabilities: { elicitation: { form: {} } }, versionNegotiation: { mode: "legacy" } },
);
client.setRequestHandler("elicitation/create", say.elicited);
let session;

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), async ({ name, arguments: args }) => {
  session ??= createTaskSessionFromClient(client, { endpointId: "stock" });
  const execution = await session.callTool(name, args, { task: { preference: "prefer" } });
  if (execution.kind !== "task") throw new Error("it did not run as a task");
  return resultFromTaskOutcome((await execution.settle()).outcome);
});
