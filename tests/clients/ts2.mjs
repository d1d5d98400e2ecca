// @modelcontextprotocol/client 2.x: takes calls as JSON lines on stdin, prints what it sees as JSON lines (see stock.py).
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { drive, say } from "./drive.mjs";

const [, , url, mode] = process.argv;
const client = new Client(
  { name: "stock-ts2", version: "1" },
  {
    capabilities: { elicitation: { form: {} }, sampling: {} },
    versionNegotiation: { mode: ["legacy", "auto"].includes(mode) ? mode : { pin: mode } },
  },
);
client.setNotificationHandler("notifications/resources/updated", say.notice);
client.setRequestHandler("elicitation/create", say.elicited);
client.setRequestHandler("sampling/createMessage", say.sampled);

await drive(client, new StreamableHTTPClientTransport(new URL(url)), (request, options) =>
  client.callTool(request, options),
);
