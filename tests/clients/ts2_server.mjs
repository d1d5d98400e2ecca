// @modelcontextprotocol/server 2.x without its session era: `http` prints its address and ends with its
// input, `stdio` serves the pipe.
import { createServer } from "node:http";
import { toNodeHandler } from "@modelcontextprotocol/node";
import { McpServer, acceptedContent, createMcpHandler, inputRequired } from "@modelcontextprotocol/server";
import { serveStdio } from "@modelcontextprotocol/server/stdio";
import { z } from "zod";

const said = (text) => ({ content: [{ type: "text", text }] });
const Order = z.object({ loaf: z.string() });
const waiting = [];
let changed = async () => {};

const bakery = () => {
  const server = new McpServer(
    { name: "bakery", version: "2" },
    { capabilities: { tools: { listChanged: true }, resources: { subscribe: true, listChanged: true }, logging: {} } },
  );
  server.registerTool("bake", { inputSchema: z.object({ loaves: z.number() }) }, async ({ loaves }, ctx) => {
    const progressToken = ctx.mcpReq._meta?.progressToken;
    for (let progress = 1; progress <= loaves; progress++) {
      await ctx.mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: loaves } });
    }
    return said(`${loaves} loaves`);
  });
  server.registerTool("order", { inputSchema: z.object({}) }, async (_, ctx) => {
    const order = acceptedContent(ctx.mcpReq.inputResponses, "loaf", Order);
    if (order !== undefined) return said(`a ${order.loaf} loaf`);
    const loaf = inputRequired.elicit({ message: "Which loaf?", requestedSchema: Order });
    return inputRequired({ inputRequests: { loaf }, requestState: "oven" });
  });
  server.registerTool("restock", { inputSchema: z.object({ uri: z.string() }) }, async ({ uri }) => {
    await changed(server, uri);
    return said("restocked");
  });
  server.registerTool("wait", { inputSchema: z.object({}) }, (_, ctx) => {
    return new Promise((resolve) => {
      waiting.push("waiting");
      ctx.mcpReq.signal.addEventListener("abort", () => {
        waiting.push("cancelled");
        resolve(said("too late"));
      });
    });
  });
  server.registerTool("look", { inputSchema: z.object({}) }, () => said(waiting.join()));
  server.registerResource("flour", "stock://flour", {}, async (uri) => ({ contents: [{ uri: uri.href, text: "12 kg" }] }));
  return server;
};

if (process.argv[2] === "http") {
  const handler = createMcpHandler(bakery, { legacy: "reject" });
  changed = async (_, uri) => {
    handler.notify.resourceUpdated(uri);
    handler.notify.toolsChanged();
  };
  process.stdin.on("end", () => process.exit()).resume();
  const http = createServer(toNodeHandler(handler)).listen(0, "127.0.0.1", () => {
    console.log(`http://127.0.0.1:${http.address().port}/mcp`);
  });
} else {
  changed = async (server, uri) => {
    await server.server.sendResourceUpdated({ uri });
    server.sendToolListChanged();
  };
  serveStdio(bakery, { legacy: "reject" });
}
