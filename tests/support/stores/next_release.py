"""Builds the next release of the package: a copy whose stores are one version further.

It has a migration and functions of its own beside those of this release, as a real one would have.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from perdure.store.postgres.layout import VERSION
from perdure.store.sqlite.sql_files import schema_version
from tests.support.processes.starting import ROOT

NEXT = VERSION + 1

SQLITE = "CREATE TABLE extra (x);"

TABLES = f"""\
-- What version {NEXT} adds: columns of tables that the release before it writes, and a table of its own.
ALTER TABLE perdure.session ADD COLUMN region text NOT NULL DEFAULT 'here';
ALTER TABLE perdure.stream ADD COLUMN region text NOT NULL DEFAULT 'here';
CREATE TABLE perdure.made (writer bigint NOT NULL);
"""

STEPS = f"""\
-- The steps of a commit, version {NEXT}: beside those of the release before it.
CREATE FUNCTION perdure.commit_{NEXT}({{parameters}}) RETURNS text[] LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO perdure.made (writer) VALUES ($1);
    RETURN perdure.commit_{VERSION}({{arguments}});
END $$;
"""


def build(folder: Path, *, oldest: int = VERSION, migrates_files: bool = True) -> tuple[str, ...]:
    """Build it; return the beginning of a command that runs it. `oldest` is the oldest version whose releases
    can use the PostgreSQL schema after the migration. No older release can use a SQLite file after its migration."""
    package = folder / "perdure"
    shutil.copytree(ROOT / "src" / "perdure", package, ignore=shutil.ignore_patterns("__pycache__"))
    sql = package / "store" / "postgres" / "sql"
    commit = f"perdure.commit_{VERSION}("
    written = (sql / f"schema_{VERSION}.sql").read_text()
    parameters = written.partition(f"CREATE FUNCTION {commit}")[2].partition(") RETURNS")[0]
    arguments = ", ".join(f"${number}" for number in range(1, parameters.count(",") + 2))
    (sql / f"schema_{NEXT}.sql").write_text(TABLES + STEPS.format(parameters=parameters, arguments=arguments))
    _edit(sql / "queries.sql", re.escape(commit), f"perdure.commit_{NEXT}(")
    _edit(sql.parent / "layout.py", r"(?<=^OLDEST: Mapping\[int, int\] = \{\n)", f"    {NEXT}: {oldest},\n")
    if migrates_files:
        (package / "store" / "sqlite" / "sql" / f"schema_{schema_version() + 1}.sql").write_text(SQLITE)
    return ("env", f"PYTHONPATH={folder}", sys.executable, "-m", "perdure")


def _edit(file: Path, pattern: str, text: str) -> None:
    edited, times = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE)
    assert times == 1, f"{pattern} is {times} times in {file}"
    file.write_text(edited)
