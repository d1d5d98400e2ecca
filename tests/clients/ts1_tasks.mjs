// @modelcontextprotocol/sdk 1.x, whose experimental client runs tools as tasks of 2025-11-25 (see stock.py).
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { CallToolResultSchema, ElicitRequestSchema } from "@modelcontextprotocol/sdk/types.js";
import { drive, say } from "./drive.mjs";

const client = new Client(
  { name: "stock-ts1-tasks", version: "1" },
  { capabilities: { elicitation: { form: {} } } },
);
client.setRequestHandler(ElicitRequestSchema, say.elicited);
let listed;

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), async (request, options) => {
  await (listed ??= client.listTools()); // it reads there which tools run as tasks
  let created = false;
  for await (const message of client.experimental.tasks.callToolStream(request, CallToolResultSchema, options)) {
    created ||= message.type === "taskCreated";
    if (message.type === "error") throw message.error;
    if (message.type === "result" && created) return message.result;
  }
  throw new Error("it did not run as a task");
});
