"""A stdio server without an SDK, whose era stands in a file that it reads at its start: the words that it answers
methods with (`yes`, `dies`, `hangs` or an error's code), as JSON; `sleep` has the seconds before it reads anything.
Each process adds its pid to the neighbour `.starts`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

place = Path(sys.argv[1])
answers = json.loads(place.read_text())
with place.with_suffix(".starts").open("a") as starts:
    starts.write(f"{os.getpid()}\n")
info = {"name": "chameleon", "version": "1"}
RESULTS = {
    "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info},
    "server/discover": {
        "resultType": "complete",
        "supportedVersions": ["2026-07-28"],
        "capabilities": {"tools": {}},
        "ttlMs": 0,
        "cacheScope": "private",
        "_meta": {"io.modelcontextprotocol/serverInfo": info},
    },
}

time.sleep(answers.get("sleep", 0))
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = answers.get(message["method"], "yes")
    if answer == "dies":
        os._exit(3)
    if answer == "hangs":
        continue
    outcome = {"result": RESULTS.get(message["method"], {"method": message["method"]})}
    if answer != "yes":
        outcome = {"error": {"code": answer, "message": "not that one"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}), flush=True)
