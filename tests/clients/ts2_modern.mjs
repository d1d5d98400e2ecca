// @modelcontextprotocol/client 2.x at 2026-07-28: as ts2.mjs, in the revision without sessions.
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { drive, say } from "./drive.mjs";

const client = new Client(
  { name: "stock-ts2", version: "1" },
  {
    capabilities: { elicitation: { form: {} }, sampling: {} },
    versionNegotiation: { mode: { pin: "2026-07-28" } },
  },
);
client.setRequestHandler("elicitation/create", say.elicited);
client.setRequestHandler("sampling/createMessage", say.sampled);

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), (request, options) =>
  client.callTool(request, options),
);
