// @modelcontextprotocol/sdk 1.20.0, which takes the session id of any response, also of a 404 (see stock.py).
import { Client } from "sdk-1.20.0/client/index.js";
import { StreamableHTTPClientTransport } from "sdk-1.20.0/client/streamableHttp.js";
import { drive } from "./drive.mjs";

const client = new Client({ name: "stock-ts1-20", version: "1" }, { capabilities: {} });

await drive(client, new StreamableHTTPClientTransport(new URL(process.argv[2])), (request, options) =>
  client.callTool(request, undefined, options),
);
