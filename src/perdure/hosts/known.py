"""Lists the hosts: the file of each on each system, the key of its servers, and the form of an entry.

Each host's documentation is the source; docs/stdio.md has the addresses.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

Scope = Literal["user", "project"]

#: Characters of a name. Hosts put it before the names of tools, and models take names of at most 64 characters in all.
MAX_NAME = 32
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME - 1}}}")
NAME_RULE = f"up to {MAX_NAME} letters, digits, hyphens and underscores, and the first is a letter or digit"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A program that starts MCP servers."""

    title: str
    key: str = "mcpServers"
    """The member of the file that holds the servers."""
    has_type: bool = False
    """Whether an entry must say `"type": "stdio"`."""
    home: tuple[str, ...] = ()
    """The user's file, below the home directory."""
    variable: str = ""
    """An environment variable that takes the place of the home directory."""
    settings: tuple[str, ...] = ()
    """The user's file, below the directory where applications of this system keep their settings."""
    project: tuple[str, ...] = ()
    """The file of one project, below its directory."""
    then: str = ""
    """How the user makes the host read its file again."""
    splits_names: bool = False
    """Whether the host takes the part after the first underscore for the name of a tool."""


HOSTS: Mapping[str, Host] = {
    "claude-desktop": Host(
        title="Claude Desktop",
        settings=("Claude", "claude_desktop_config.json"),
        then="quit Claude Desktop and start it again",
    ),
    "claude-code": Host(
        title="Claude Code",
        home=(".claude.json",),
        variable="CLAUDE_CONFIG_DIR",
        project=(".mcp.json",),
        then="start claude again, and see /mcp there",
    ),
    "cursor": Host(
        title="Cursor",
        home=(".cursor", "mcp.json"),
        project=(".cursor", "mcp.json"),
        then="see the list of MCP servers in Cursor's settings",
    ),
    "vscode": Host(
        title="VS Code",
        key="servers",
        has_type=True,
        settings=("Code", "User", "mcp.json"),
        project=(".vscode", "mcp.json"),
        then="run the command MCP: List Servers in VS Code",
    ),
    "windsurf": Host(
        title="Windsurf",
        home=(".codeium", "windsurf", "mcp_config.json"),
        then="refresh the list of MCP servers in Windsurf",
    ),
    "gemini-cli": Host(
        title="Gemini CLI",
        home=(".gemini", "settings.json"),
        variable="GEMINI_CLI_HOME",
        project=(".gemini", "settings.json"),
        then="start gemini again, and see /mcp there",
        splits_names=True,
    ),
    "mcp-json": Host(
        title="a file in the common format",
        project=(".mcp.json",),
    ),
}


def config_path(
    host: Host, scope: Scope, *, platform: str, home: PurePath, project: PurePath, environ: Mapping[str, str]
) -> PurePath | None:
    """Return the file that the host reads; None if the host has none of this scope."""
    if scope == "project":
        return project.joinpath(*host.project) if host.project else None
    if host.variable and environ.get(host.variable):
        return project.joinpath(environ[host.variable], *host.home)
    if host.home:
        return home.joinpath(*host.home)
    if host.settings:
        if platform == "darwin":
            return home.joinpath("Library", "Application Support", *host.settings)
        name, usual = ("APPDATA", ("AppData", "Roaming")) if platform == "win32" else ("XDG_CONFIG_HOME", (".config",))
        given = type(home)(environ.get(name, ""))
        # A relative path in the environment is ignored, as XDG asks.
        return (given if given.is_absolute() else home.joinpath(*usual)).joinpath(*host.settings)
    return None


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def entry(host: Host, command: Sequence[str]) -> dict[str, Any]:
    """Return the entry that makes the host run this command."""
    program, *arguments = command
    kind = {"type": "stdio"} if host.has_type else {}
    return {**kind, "command": program, "args": arguments}


def is_bridge(found: object) -> bool:
    """Whether an entry runs `perdure stdio`, by its path, through a launcher or as a module."""
    return _bridged(found) is not None


def described(found: object) -> str:
    """Name the program of an entry, without its arguments and its environment, which may hold secrets."""
    if (arguments := _bridged(found)) is not None:
        shown = arguments[arguments.index("--") :][:2] if "--" in arguments else arguments[:1]
        return " ".join(["perdure stdio", *shown])
    return str(found.get("command") or "no command") if isinstance(found, dict) else "not an object"


def _bridged(found: object) -> list[str] | None:
    """Return the arguments after `perdure stdio`; None if an entry does not run it."""
    if not isinstance(found, dict) or not isinstance(arguments := found.get("args"), list):
        return None
    words = [str(word) for word in (found.get("command"), *arguments)]
    programs = [re.split(r"[/\\]", word)[-1].lower().removesuffix(".exe") for word in words]
    for at, (program, word) in enumerate(zip(programs, words[1:], strict=False)):
        if (program, word) == ("perdure", "stdio"):
            return words[at + 2 :]
    return None
