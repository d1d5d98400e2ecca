"""Lists the hosts: the file of each on each system, the key of its servers, and the form of an entry.

Each host's documentation is the source; docs/stdio.md has the addresses.
"""

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal
from urllib.parse import quote

Entry = Mapping[str, Any]
Scope = Literal["user", "project"]

#: Characters of a name. Hosts put it before the names of tools, and models take names of at most 64 characters in all.
MAX_NAME = 32
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MAX_NAME - 1}}}")
NAME_RULE = f"up to {MAX_NAME} letters, digits, hyphens and underscores, and the first is a letter or digit"


def _cursor_link(name: str, entry: Entry) -> str:
    config = base64.b64encode(_compact(entry).encode()).decode()
    return f"cursor://anysphere.cursor-deeplink/mcp/install?name={name}&config={quote(config, safe='')}"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Host:
    """A program that starts MCP servers."""

    title: str
    key: str = "mcpServers"
    """The member of the file that holds the servers."""
    is_toml: bool = False
    """Whether the file is TOML; the others are JSON with comments."""
    further: Entry = field(default_factory=dict)
    """Members that every entry must have."""
    is_one_list: bool = False
    """Whether the program and its arguments are one list, under `command`."""
    home: tuple[str, ...] = ()
    """The user's file, below the home directory."""
    variable: str = ""
    """An environment variable that takes the place of the home directory."""
    folder_variable: str = ""
    """An environment variable that takes the place of the folder of the user's file."""
    settings: tuple[str, ...] = ()
    """The user's file, below the directory where applications of this system keep their settings."""
    is_xdg: bool = False
    """Whether that directory is `$XDG_CONFIG_HOME` or `~/.config` on macOS and Windows, too."""
    project: tuple[str, ...] = ()
    """The file of one project, below its directory."""
    then: str = ""
    """How the user makes the host read its file again."""
    splits_names: bool = False
    """Whether the host takes the part after the first underscore for the name of a tool."""
    link: Callable[[str, Entry], str] | None = None
    """Makes the link that adds a server, of its name and its entry."""


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
        link=_cursor_link,
    ),
    "vscode": Host(
        title="VS Code",
        key="servers",
        further={"type": "stdio"},
        settings=("Code", "User", "mcp.json"),
        project=(".vscode", "mcp.json"),
        then="run the command MCP: List Servers in VS Code",
        link=lambda name, entry: f"vscode:mcp/install?{quote(_compact({'name': name, **entry}), safe='')}",
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
    "qwen-code": Host(
        title="Qwen Code",
        home=(".qwen", "settings.json"),
        project=(".qwen", "settings.json"),
        then="start qwen again, and see /mcp there",
        splits_names=True,
    ),
    "codex": Host(
        title="Codex CLI",
        key="mcp_servers",
        is_toml=True,
        home=(".codex", "config.toml"),
        folder_variable="CODEX_HOME",
        project=(".codex", "config.toml"),
        then="start codex again, and see /mcp there",
    ),
    "opencode": Host(
        title="opencode",
        key="mcp",
        further={"type": "local"},
        is_one_list=True,
        settings=("opencode", "opencode.json"),
        is_xdg=True,
        project=("opencode.json",),
        then="start opencode again",
    ),
    "copilot-cli": Host(
        title="Copilot CLI",
        further={"type": "local", "tools": ["*"]},
        home=(".copilot", "mcp-config.json"),
        folder_variable="COPILOT_HOME",
        then="start copilot again, and see /mcp there",
    ),
    "zed": Host(
        title="Zed",
        key="context_servers",
        settings=("zed", "settings.json"),
        is_xdg=True,
        project=(".zed", "settings.json"),
        then="see the MCP servers in the settings of Zed's agent",
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
    if host.folder_variable and environ.get(host.folder_variable):
        return project.joinpath(environ[host.folder_variable], host.home[-1])
    if host.home:
        return home.joinpath(*host.home)
    if host.settings:
        if platform == "darwin" and not host.is_xdg:
            return home.joinpath("Library", "Application Support", *host.settings)
        is_windows = platform == "win32" and not host.is_xdg
        name, usual = ("APPDATA", ("AppData", "Roaming")) if is_windows else ("XDG_CONFIG_HOME", (".config",))
        given = type(home)(environ.get(name, ""))
        # A relative path in the environment is ignored, as XDG asks.
        return (given if given.is_absolute() else home.joinpath(*usual)).joinpath(*host.settings)
    return None


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def entry(host: Host, command: Sequence[str]) -> dict[str, Any]:
    """Return the entry that makes the host run this command."""
    if host.is_one_list:
        return {**host.further, "command": list(command)}
    program, *arguments = command
    return {**host.further, "command": program, "args": arguments}


def is_bridge(found: object) -> bool:
    """Whether an entry runs `perdure stdio`, by its path, through a launcher or as a module."""
    return _bridged(found) is not None


def described(found: object) -> str:
    """Name the program of an entry, without its arguments and its environment, which may hold secrets."""
    if (arguments := _bridged(found)) is not None:
        shown = arguments[arguments.index("--") :][:2] if "--" in arguments else arguments[:1]
        return " ".join(["perdure stdio", *shown])
    return _words(found)[0] if _words(found) else "no command"


def _bridged(found: object) -> list[str] | None:
    """Return the arguments after `perdure stdio`; None if an entry does not run it."""
    words = _words(found)
    programs = [re.split(r"[/\\]", word)[-1].lower().removesuffix(".exe") for word in words]
    for at, (program, word) in enumerate(zip(programs, words[1:], strict=False)):
        if (program, word) == ("perdure", "stdio"):
            return words[at + 2 :]
    return None


def _words(found: object) -> list[str]:
    """Return the program of an entry and its arguments; none if it is not an entry."""
    command = found.get("command") if isinstance(found, dict) else None
    if isinstance(found, dict) and isinstance(command, str) and command:
        arguments = found.get("args")
        return [command, *map(str, arguments if isinstance(arguments, list) else ())]
    return [str(word) for word in command] if isinstance(command, list) else []
