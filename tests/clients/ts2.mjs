// @modelcontextprotocol/client 2.x: takes calls as JSON lines on stdin, prints what it sees as JSON lines (see stock.py).
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { drive, say } from "./drive.mjs";

const client = new Client(
  { name: "stock-ts2", version: "1" },
  { capabilities: { elicitation: { form: {} }, sampling: {} } },
);
client.setNotificationHandler("notifications/resources/updated", say.notice);
client.setRequestHandler("elicitation/create", say.elicited);
client.setRequestHandler("sampling/createMessage", say.sampled);

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), (request, options) =>
  client.callTool(request, options),
);
