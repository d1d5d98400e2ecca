// @modelcontextprotocol/sdk 1.x: takes calls as JSON lines on stdin, prints what it sees as JSON lines (see stock.py).
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ResourceUpdatedNotificationSchema,
} from "@modelcontextprotocol/sdk/types.js";
import { drive, say } from "./drive.mjs";

const client = new Client(
  { name: "stock-ts1", version: "1" },
  { capabilities: { elicitation: { form: {} }, sampling: {} } },
);
client.setNotificationHandler(ResourceUpdatedNotificationSchema, say.notice);
client.setRequestHandler(ElicitRequestSchema, say.elicited);
client.setRequestHandler(CreateMessageRequestSchema, say.sampled);

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), (request, options) =>
  client.callTool(request, undefined, options),
);
