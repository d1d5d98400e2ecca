"""Ends the process groups that a dead gateway has left: a program that imports nothing but the standard library.

A gateway that is killed cannot end its children, and a server may ignore the end of its input. So the gateway starts
this program beside them and writes to its input: `+GROUP START` for each group that it starts, where START is the time
at which the group's first process was started, and `-GROUP` for each that is gone. The end of the input is the end of
the gateway, however it came. What is left then is ended, and the program itself ends.

The kernel's own means follows the thread that started a child, not the process (`PR_SET_PDEATHSIG`).
"""

import os
import signal
import time

#: Seconds that a group has after SIGTERM. Its input has ended as well, so most are gone before.
GRACE = 2.0
_POLL = 0.02


def start_time(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" where the system does not say or there is no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name is in parentheses and may hold any character; the start time is the 20th field after.
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def signal_group(group: int, sign: int) -> bool:
    """Send a signal to a group, 0 to look only. Returns whether the group has a process."""
    try:
        os.killpg(group, sign)
    except ProcessLookupError:
        return False
    except PermissionError:  # a program that became another user; macOS says so of zombies, too
        return sign == 0
    return True


def is_same(group: int, started: str) -> bool:
    """Whether the number still names that group. While a group has a process, the system gives its number to no other
    process, so a group whose first process is gone is the same."""
    now = start_time(group)
    return not now or not started or now == started


def reap(groups: dict[int, str]) -> None:
    left = [group for group, started in groups.items() if is_same(group, started)]
    left = [group for group in left if signal_group(group, signal.SIGTERM)]
    deadline = time.monotonic() + GRACE
    while (left := [group for group in left if signal_group(group, 0)]) and time.monotonic() < deadline:
        time.sleep(_POLL)
    for group in left:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    # A terminal or a service manager sends these to all processes at once; the gateway may still be draining.
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    groups: dict[int, str] = {}
    unread = b""
    while chunk := os.read(0, 65536):
        *lines, unread = (unread + chunk).split(b"\n")
        for line in lines:
            group, _, started = line[1:].decode().partition(" ")
            if line.startswith(b"+"):
                groups[int(group)] = started
            else:
                groups.pop(int(group), None)
    reap(groups)


if __name__ == "__main__":
    main()
