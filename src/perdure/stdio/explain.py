"""Explains which session a bridge would go on with: the host that was found, the slots there, and why (T7, T9)."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from perdure.stdio.identity import MAX_LAUNCHERS, Processes, ProcessInfo, here, identify
from perdure.stdio.launchers import ProcessKind, classify, is_script
from perdure.stdio.resume_slot import SlotState, Target, Use, survey

_USES = {
    Use.ALIKE: "of this address, these options and this directory",
    Use.OURS: "of this address, these options and this directory, of another credential",
    Use.BLANK: "of no bridge",
    Use.OTHER: "of another address, of other options or of another directory",
    Use.FOREIGN: "of another machine or container",
}
_KINDS = {
    ProcessKind.HOST: "the host: it is not a launcher that is known",
    ProcessKind.LAUNCHER: "a launcher",
    ProcessKind.MANAGER: "a process manager: the host is not known",
}


def explain(directory: Path | None, target: Target, say: Callable[[str, str], None]) -> None:
    """Call `say` with each fact, as a name and a text. Nothing is taken, written or asked for."""
    processes = here()
    chain = [] if processes is None else _chain(processes)
    for place, found in enumerate(chain):
        kind = _KINDS[classify(name=found.name, words=found.words)] if place else "this bridge"
        say("process", f"{found.pid} {found.name}: {kind}")
    identity = identify(processes)
    if identity is None:
        say("session", "a fresh one: no host process is known, so none can be found again")
        return
    say("host", f"process {identity.pid} ({chain[-1].name}): its bridges go on with their sessions while it runs")
    if is_script(chain[-1].words):
        say("", "If your host started this script, let the script start the bridge with `exec`: it is another process")
        say("", "each time, and no session is found again by it.")
    say("address", target.url)
    if directory is None:
        say("session", "a fresh one: no directory for resume tokens is known; name one with --token-dir")
        return
    say("files", str(directory))
    try:
        states = survey(directory, identity, target)
    except OSError as error:
        say("session", f"a fresh one: the directory cannot be used: {error}")
        return
    for state in states:
        what = "a bridge uses it" if state.is_held else "a session waits" if state.is_known else "no session waits"
        say("slot", f"{state.name}: {_USES[state.use]}; {what}")
    say("session", outcome(states))


def outcome(states: Sequence[SlotState]) -> str:
    """What a bridge does that finds these slots; `slot` has the table."""
    ours = [state for state in states if state.use is Use.ALIKE] or [state for state in states if state.use is Use.OURS]
    waiting = [state for state in ours if state.is_known and not state.is_held]
    held = [state for state in ours if state.is_held]
    if len(waiting) > 1:
        return f"a fresh one: {len(waiting)} wait and cannot be told apart; give each bridge a name with --instance"
    if waiting:
        return f"the one of slot {waiting[0].name}: it is the only one that waits"
    if held:
        return f"a fresh one, unless slot {held[0].name} becomes free within a second: its bridge still runs"
    return "a fresh one: none of this host waits for this address, these options and this directory"


def _chain(processes: Processes) -> list[ProcessInfo]:
    """This process and those above it, to the first that is not a launcher."""
    found = processes.look(os.getpid())
    chain: list[ProcessInfo] = []
    while found is not None and len(chain) <= MAX_LAUNCHERS + 1:
        chain.append(found)
        if len(chain) > 1 and classify(name=found.name, words=found.words) is not ProcessKind.LAUNCHER:
            break
        found = processes.look(found.parent) if found.parent > 1 else None
    return chain
