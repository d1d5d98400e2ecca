"""Lends its stdin and stdout to the process that listens at a Unix socket, and lives as long as that uses them.

It is the program of `behind_gateway`, started without site packages: it must start fast.
"""

import os
import socket
import sys

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as lender:
        lender.connect(sys.argv[1])
        socket.send_fds(lender, [b"p"], [0, 1])
        os.close(0)
        os.close(1)
        lender.recv(1)
