"""Never a wrong session, whatever happens (T7, T9).

In every history of hosts and bridges that start, end, are killed, and of machines that start again: a token is offered
only by a bridge of the host process and the target that it was kept for, by one at a time, and never after it was
rejected; a bridge finds the token that rests there for it if it is the only one, and none where several rest.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from perdure.stdio.identity import Identity
from perdure.stdio.resume_slot import Slot
from tests.support.processes.fake_hosts import Living, killed, opened, target, token
from tests.support.stores import memory_files

Owner = tuple[Identity, str]
TARGETS = st.sampled_from(["one", "one", "two"])
SPACES = st.sampled_from(["machine", "machine", "container"])
ENDS = st.sampled_from(["runs", "is rejected", "dies first", "dies writing"])
#: Mostly the same: several bridges of one host and target are what makes it hard.
FEW = st.sampled_from([2, 2, 2, 3])


@dataclass(eq=False, kw_only=True)
class Bridge:
    owner: Owner
    slot: Slot
    token: str


@dataclass(kw_only=True)
class ChangingServers:
    """What should be, kept by hand."""

    boot: int = 1
    hosts: list[Identity] = field(default_factory=list)
    bridges: list[Bridge] = field(default_factory=list)
    used: set[Identity] = field(default_factory=set)
    resting: dict[Owner, set[str]] = field(default_factory=dict)
    """Tokens on the disk that no bridge holds."""
    issued: int = 0

    def rest(self, owner: Owner, text: str) -> None:
        self.resting.setdefault(owner, set()).add(text)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir=memory_files.SMALL)
        self.folder = Path(self.place.name) / "tokens"
        self.world = ChangingServers()

    def teardown(self) -> None:
        for bridge in self.world.bridges:
            bridge.slot.release()
        self.place.cleanup()

    @rule(pid=FEW, start=FEW, space=SPACES, name=TARGETS, end=ENDS)
    def a_bridge_starts(self, pid: int, start: int, space: str, name: str, end: str) -> None:
        host = self.host(pid, start, space)
        owner = (host, name)
        slot = self.open(host, name)
        offered = slot.token()
        rests = self.world.resting.get(owner, set())
        assert offered == (min(rests) if len(rests) == 1 else None)
        if len(rests) > 1:
            rests.clear()  # they cannot be told apart
        if end in {"dies first", "dies writing"}:
            if end == "dies writing":
                assert slot.positions is not None
                written = slot.positions.name.replace("positions", "token") + ".new"
                (self.folder / written).write_text("a part")
            killed(slot)
            return
        if offered is not None:
            rests.remove(offered)
            if end == "is rejected":
                slot.on_rejected()
        self.world.issued += 1
        assert slot.keep(token(self.world.issued))
        self.world.bridges.append(Bridge(owner=owner, slot=slot, token=token(self.world.issued)))

    @precondition(lambda self: self.world.bridges)
    @rule(data=st.data())
    def a_token_is_rotated(self, data: st.DataObject) -> None:
        bridge = data.draw(st.sampled_from(self.world.bridges))
        self.world.issued += 1
        bridge.token = token(self.world.issued)
        assert bridge.slot.keep(bridge.token)

    @precondition(lambda self: self.world.bridges)
    @rule(data=st.data(), peacefully=st.booleans())
    def a_bridge_ends(self, data: st.DataObject, peacefully: bool) -> None:
        self.end(data.draw(st.sampled_from(self.world.bridges)), peacefully=peacefully)

    @precondition(lambda self: self.world.bridges)
    @rule(peacefully=st.booleans())
    def all_bridges_end(self, peacefully: bool) -> None:
        for bridge in list(self.world.bridges):
            self.end(bridge, peacefully=peacefully)

    @precondition(lambda self: self.world.hosts)
    @rule(data=st.data(), with_bridges=st.booleans())
    def a_host_ends(self, data: st.DataObject, with_bridges: bool) -> None:
        host = data.draw(st.sampled_from(self.world.hosts))
        self.world.hosts.remove(host)
        for bridge in [bridge for bridge in self.world.bridges if bridge.owner[0] == host and with_bridges]:
            self.end(bridge, peacefully=False)

    @precondition(lambda self: self.world.resting)
    @rule()
    def the_machine_starts_again(self) -> None:
        for bridge in list(self.world.bridges):
            self.end(bridge, peacefully=False)
        self.world.hosts.clear()
        self.world.boot += 1

    @precondition(lambda self: self.world.hosts)
    @rule(data=st.data())
    def a_token_is_copied_to_another_name(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(self.world.hosts))
        tokens = sorted(self.folder.glob("token-*")) if self.folder.exists() else []
        if tokens and not (self.folder / f"target-{host.pid}-{host.start}").exists():
            stolen = data.draw(st.sampled_from(tokens)).read_bytes()
            copy = self.folder / f"token-{host.pid}-{host.start}"
            copy.write_bytes(stolen)
            copy.chmod(0o600)

    @invariant()
    def what_rests_for_a_living_host_is_there(self) -> None:
        found = [path.read_text() for path in self.folder.glob("token-*")] if self.folder.exists() else []
        living = [tokens for (host, _), tokens in self.world.resting.items() if host in self.world.hosts]
        assert set(found) >= set().union(*living)

    def host(self, pid: int, start: int, space: str) -> Identity:
        """The living host of this pid, else a new one: with a pid and a start that others have had, before the machine
        was started or in another container, but not both and in the same place."""
        for living in self.world.hosts:
            if (living.pid, living.space) == (pid, space):
                return living
        boot = str(self.world.boot)
        host = Identity(pid=pid, start=start, boot=boot, space=space)
        while host in self.world.used:
            host = replace(host, start=host.start + 1)
        self.world.hosts.append(host)
        self.world.used.add(host)
        return host

    def open(self, host: Identity, name: str) -> Slot:
        alive = {(other.pid, other.start) for other in self.world.hosts if other.space == host.space}
        return opened(self.folder, host, target(name), processes=Living(alive, boot=host.boot, space=host.space))

    def end(self, bridge: Bridge, *, peacefully: bool) -> None:
        if peacefully:
            bridge.slot.release()
        else:
            killed(bridge.slot)
        self.world.bridges.remove(bridge)
        self.world.rest(bridge.owner, bridge.token)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=30)
