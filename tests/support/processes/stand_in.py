"""Stands in for a Python program that another program starts: `python -I -S stand_in.py SOCKET MODULE ARGUMENTS`.

A test cannot have its fork server start a program that another program starts. So the other program starts this one,
which imports almost nothing. It sends its files, folder and environment to the test (`starting.stand_ins`), and ends as
the program does that the fork server then starts with them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> int:
    place, module, *arguments = sys.argv[1:]
    order = {"module": module, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test:
        test.connect(place)
        socket.send_fds(test, [json.dumps(order).encode()], [0, 1, 2])
        _, [status], _, _ = socket.recv_fds(test, 1, 1)
    with open(status) as told:
        pid = int(told.readline())
        signal.signal(signal.SIGTERM, lambda sent, _: os.kill(pid, sent))
        return int(told.readline())


if __name__ == "__main__":
    sys.exit(main())
