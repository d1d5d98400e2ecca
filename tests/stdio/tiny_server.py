"""An MCP server that starts in milliseconds: `safe` may run again, `once` may not. Both wait for a file, if one is
given, after they have sent progress; the answer is the process's pid."""

import json
import os
import sys
import time


def main() -> None:
    if sys.argv[1:]:
        with open(sys.argv[1], "a") as starts:
            starts.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        method, params = message["method"], message.get("params") or {}
        result: dict[str, object] = {}
        if method == "initialize":
            about = {"name": "tiny", "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
        elif method == "tools/list":
            hints = {"idempotentHint": True}
            tool: dict[str, object] = {"name": "once", "inputSchema": {"type": "object"}}
            result = {"tools": [tool, {**tool, "name": "safe", "annotations": hints}]}
        elif method == "tools/call":
            if (token := params.get("_meta", {}).get("progressToken")) is not None:
                notice = {"progressToken": token, "progress": 1}
                print(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": notice}), flush=True)
            while "gate" in params["arguments"] and not os.path.exists(params["arguments"]["gate"]):
                time.sleep(0.002)
            result = {"content": [{"type": "text", "text": str(os.getpid())}]}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
