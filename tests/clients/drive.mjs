// What both TypeScript scripts share: callbacks that print, and the loop that takes calls. No client is imported here.
import { createInterface } from "node:readline";

const print = (line) => process.stdout.write(JSON.stringify(line) + "\n");

// The same answers as in stock.py.
const USER_SAYS = "forty-two";
const MODEL_SAYS = "a poem";

export const say = {
  notice: (notification) => print({ notice: notification.params.uri }),
  elicited: (request) => {
    print({ asked: request.params.message });
    return { action: "accept", content: { answer: USER_SAYS } };
  },
  sampled: (request) => {
    const { content } = request.params.messages[0];
    print({ asked: (Array.isArray(content) ? content[0] : content).text });
    return { role: "assistant", model: "none", content: { type: "text", text: MODEL_SAYS } };
  },
};

/** Connect, then make each call that comes on stdin; at its end, end the session and close. */
export async function drive(client, transport, callTool) {
  client.onerror = (error) => print({ error: String(error) });
  await client.connect(transport);
  print({ ready: transport.protocolVersion });

  let calls = 0;
  for await (const line of createInterface({ input: process.stdin })) {
    const { tool, arguments: args } = JSON.parse(line);
    void report(calls++, callTool, tool, args);
  }
  await transport.terminateSession().catch((error) => print({ error: String(error) }));
  await client.close();
}

async function report(call, callTool, name, args) {
  const onprogress = ({ progress }) => print({ call, progress });
  const onresumptiontoken = (token) => print({ call, token });
  try {
    const { content, isError } = await callTool({ name, arguments: args }, { onprogress, onresumptiontoken });
    print({ call, answer: (isError ? "error: " : "") + content[0].text });
  } catch (error) {
    const { code, data } = error;
    print({ call, answer: `error: ${error.message}`, code: typeof code === "number" ? code : undefined, data });
  }
}
