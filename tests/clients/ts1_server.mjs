// @modelcontextprotocol/sdk 1.x over stdio: a server of the session era.
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";

const server = new McpServer({ name: "stock-ts1", version: "1" });
server.tool("hello", async () => ({ content: [{ type: "text", text: "hello" }] }));
await server.connect(new StdioServerTransport());
