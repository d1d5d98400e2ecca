"""Makes, migrates and checks the file of a SQLite store for an operator."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence

from perdure._core.ids import NodeId
from perdure.errors import BadSetting, StoreError, StoreUnavailable
from perdure.store.maintenance import BackedUp, CheckResult, Fact
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.backup import back_up
from perdure.store.sqlite.file import (
    APPLICATION_ID,
    BACKUP_ID,
    OPERATOR_PATIENCE,
    OUR_IDS,
    Sync,
    begin_again,
    check_file,
    connect_existing,
    is_damage,
    is_empty,
    named,
    open_writer,
    pragma,
    refuse_newer,
    refuse_other_log,
    refuse_unfit,
)
from perdure.store.sqlite.locks import locks_of

_SQL = _sql.queries()


class SqliteMaintenance:
    """Does the operator's work on the file at a path."""

    def __init__(self, path: str, *, sync: Sync) -> None:
        self._path = os.path.abspath(path)
        self._sync: Sync = sync
        self.shown = f"sqlite:{path}"
        self.latest = _sql.schema_version()

    async def version(self) -> int:
        return await asyncio.to_thread(self._version)

    def _version(self) -> int:
        if not os.path.exists(self._path):
            return 0
        with named(self._path, "opened"), contextlib.closing(self._look()) as file:
            if is_empty(file):
                return 0
            if pragma(file, "application_id") not in OUR_IDS:
                raise StoreError(f"the SQLite file {self._path} is not a Perdure store; give Perdure a file of its own")
            refuse_newer(file, self._path)
            return pragma(file, "user_version")

    def script(self, version: int, *, grant: str | None) -> str:
        _refuse_grant(grant)
        return "\n\n".join(
            [
                f"-- Perdure: what leads from version {version} of a SQLite file to version {self.latest}.",
                "PRAGMA journal_mode = WAL;",
                "BEGIN IMMEDIATE;",
                *(statement for step in _sql.migrations() if step.version > version for statement in step.statements),
                f"PRAGMA application_id = {APPLICATION_ID};",
                f"PRAGMA user_version = {self.latest};",
                "COMMIT;",
            ]
        )

    async def make(self, *, grant: str | None) -> None:
        _refuse_grant(grant)
        await asyncio.to_thread(
            lambda: open_writer(self._path, sync=self._sync, busy_timeout=OPERATOR_PATIENCE).close()
        )

    async def check(self) -> Sequence[Fact]:
        return await asyncio.to_thread(self._check)

    def _check(self) -> list[Fact]:
        try:
            version = self._version()
        except StoreError as error:
            if isinstance(error, StoreUnavailable) and not is_damage(error.__cause__):
                raise
            return [
                Fact(name="file", value=self._path),
                Fact(name="version", value=None, says="unknown", problem=str(error)),
            ]
        if version == 0:
            problem = f"there is no store in {self._path}: `perdure store init {self.shown}` makes it"
        elif version < self.latest:
            problem = f"version {version} is older: `perdure store migrate {self.shown}` brings it to {self.latest}"
        else:
            problem = ""
        says = f"{version or 'none'} (this release makes {self.latest})"
        there = os.path.exists(self._path)
        writes = os.access(self._path if there else os.path.dirname(self._path), os.W_OK)
        facts = [
            Fact(name="file", value=self._path),
            Fact(name="version", value=version, says=says, problem=problem),
            Fact(
                name="writes",
                value=writes,
                says="yes" if writes else "no",
                problem="" if writes else f"this user may not write {self._path}: change its owner or its mode",
            ),
        ]
        if version == self.latest:
            living, joined = self._nodes()
            facts.append(Fact(name="nodes", value=len(living), says=f"{len(living)} live, {joined - len(living)} dead"))
        return facts

    async def living(self, *, patiently: bool = True) -> Sequence[NodeId]:
        return (await asyncio.to_thread(self._nodes))[0]

    async def holders(self) -> Sequence[NodeId]:
        return await asyncio.to_thread(locks_of(self._path).holders)

    def _nodes(self) -> tuple[list[NodeId], int]:
        """The nodes that live, and how many have joined."""
        with named(self._path, "read"), contextlib.closing(self._look()) as file:
            joined = [NodeId(row[0]) for row in file.execute(_SQL["all_nodes"])]
        locks = locks_of(self._path)
        return [node for node in joined if locks.is_held(node)], len(joined)

    async def verify(self) -> CheckResult:
        refuse_unfit(self._path)
        with named(self._path, "checked"), contextlib.closing(self._look()) as file:
            try:
                return await asyncio.to_thread(check_file, file)
            except asyncio.CancelledError:
                file.interrupt()  # or the thread would go on to its end
                raise

    async def put_back(self) -> None:
        refuse_unfit(self._path)
        with named(self._path, "opened"), contextlib.closing(self._look()) as file:
            was_marked = pragma(file, "application_id") == BACKUP_ID
        with named(self._path, "written"):
            # Opening a backup notes it already.
            file = open_writer(self._path, sync="full", busy_timeout=OPERATOR_PATIENCE)
            with contextlib.closing(file):
                if not was_marked:
                    file.execute("BEGIN IMMEDIATE")
                    begin_again(file)
                    file.execute("COMMIT")

    def back_up(self, target: str, *, checks: bool, on_copied: Callable[[int, int], None]) -> BackedUp:
        path = os.path.abspath(target)
        size, verdict = back_up(self._path, path, checks=checks, on_copied=on_copied)
        return BackedUp(path=path, bytes=size, verdict=verdict)

    def _look(self) -> sqlite3.Connection:
        refuse_other_log(self._path)
        return connect_existing(self._path)


def _refuse_grant(grant: str | None) -> None:
    if grant is not None:
        raise BadSetting("--grant is for databases with roles; who may use a SQLite file, its owner and mode decide")
