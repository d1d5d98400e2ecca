"""Reads which servers to serve: `mcpServers` JSON as hosts have it, tables of `perdure.toml`, or a command's words.

The functions take texts, variables and a folder, and return upstreams or raise `Misuse` with one sentence. No sentence
has the value of a variable, an argument or a header in it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from perdure._core.jsonc import BadDocument, Members, decode
from perdure._core.text import did_you_mean
from perdure.errors import Misuse
from perdure.gateway.upstream import MASK, Auth, EraName, HttpUpstream, Program, Text, Texts, Upstream, keys_of, masked
from perdure.settings import NUMBERS, Rule

HOLDERS = ("mcpServers", "servers", "context_servers")
"""The keys under which hosts keep their servers."""
ADDRESSES = frozenset({"httpUrl", "serverUrl"})
"""Names of `url` in the files of Gemini and Windsurf."""
OWN = "perdure"
"""The key of a server in JSON that holds Perdure's own keys."""
TYPES: Mapping[str, Literal["command", "url"]] = {
    "stdio": "command",
    "http": "url",
    "streamable-http": "url",
    "streamableHttp": "url",
}
"""The types of servers, and the key that each needs."""

_PROGRAM_KEYS, _ADDRESS_KEYS, _UPSTREAM_KEYS = keys_of(Program), keys_of(HttpUpstream), keys_of(Upstream)
_OF_PROGRAM = ("args", "env", "envFile", "cwd", *_PROGRAM_KEYS)
_OF_ADDRESS = ("headers", "token_env", "token_file", *_ADDRESS_KEYS)
OWN_KEYS = frozenset({*_PROGRAM_KEYS, *_ADDRESS_KEYS, *_UPSTREAM_KEYS, "token_env", "token_file", "rerun"})
SHARED_KEYS = frozenset(
    {"type", "command", "args", "env", "envFile", "cwd", "url", "headers", "disabled", "enabled", OWN}
)
"""Keys that hosts and Perdure understand alike."""
HOST_KEYS = frozenset(
    {"alwaysAllow", "autoApprove", "autoStart", "auth", "authProviderType", "description", "dev", "disabledTools"}
    | {"enabledTools", "excludeTools", "gallery", "headersHelper", "icon", "includeTools", "metadata", "name", "note"}
    | {"oauth", "roots", "sandbox", "sandboxEnabled", "settings", "source", "timeout", "title", "tools", "transport"}
    | {"transportType", "trust", "version", "watchPaths"}
)
"""Keys that are for a host alone, in the files of Claude, Cline, Cursor, Gemini, Roo, VS Code, Windsurf and Zed."""

MAX_NAME = 64
"""Characters of a name: it is a segment of the path, and a part of the store's file name."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
RESERVED = frozenset({"resume"})
"""The resume broker stands there."""

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name (RFC 9110, 5.6.2)."""
HEADER_VALUE = re.compile(r"[ -~]*")
_HEADER = re.compile(rf"header:({_TOKEN.pattern})")
MADE_HERE = frozenset(
    {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "keep-alive", "last-event-id"}
    | {"mcp-protocol-version", "mcp-session-id", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that belong to one hop, or to the protocol: the gateway writes them itself."""
_AUTHORIZATION = "authorization"
_TOKEN_ENV = "token_env"

_LAUNCHERS = re.compile(r"npx|npm|pnpm|pnpx|bunx?|uvx?|pipx|deno|node|nodejs|python[0-9.]*")
_SUBCOMMANDS = frozenset({"run", "exec", "x", "dlx", "tool"})
_ENDING = re.compile(r"\.(py|js|mjs|cjs|ts|sh|exe)$")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a configuration may refer to."""

    environ: Mapping[str, str] = field(repr=False)
    folder: Path
    """Where relative paths begin."""
    read_variables: Callable[[Path], Mapping[str, str]]
    """Reads a file of variables. Raises `Misuse`."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The upstreams of a configuration, and sentences about keys that were ignored."""

    upstreams: tuple[Upstream, ...]
    are_named: bool = False
    """The user has named them, so each has a store of its own: also one that is alone today."""
    warnings: tuple[str, ...] = ()


# Files


def parse_servers(text: str, *, file: str, around: Surroundings) -> Servers:
    """Read the JSON of a host. `file`: its name in sentences. Raises `Misuse`."""
    try:
        root = decode(text)
    except BadDocument as error:
        raise Misuse(f"{file} is not JSON: {error}") from error
    if not isinstance(root, dict):
        raise Misuse(f"{file} is not a JSON object; it begins with {{")
    found = [holder for holder in HOLDERS if holder in root]
    if not found:
        raise Misuse(f"{file} has no servers: it has none of the keys {', '.join(HOLDERS)}")
    if len(found) > 1:
        raise Misuse(f"{file} has {' and '.join(found)}; keep the servers under one of them")
    entries = root[found[0]]
    if not isinstance(entries, Members):
        raise Misuse(f"{file}: {found[0]} is not an object with a member for each server")
    if entries.repeated:
        raise Misuse(f"{file}: the name {entries.repeated[0]!r} comes twice; each server needs a name of its own")
    unknown: dict[str, list[str]] = {}
    upstreams = []
    for name, values in entries.items():
        where = f"{file}: server {name!r}"
        if not isinstance(values, dict):
            raise Misuse(f"{where} is not an object")
        values = {"url" if key in ADDRESSES and "url" not in values else key: one for key, one in values.items()}
        ours = values.get(OWN, {})
        if not isinstance(ours, dict):
            raise Misuse(f'{where}: "{OWN}" is not an object')
        _refuse_unknown(where, ours, OWN_KEYS)
        # Hosts have an object there, and ignoring what is meant for us would be no answer.
        is_ours = values.get("auth") in get_args(Auth)
        for key in values.keys() - SHARED_KEYS - (HOST_KEYS - {"auth"} if is_ours else HOST_KEYS):
            unknown.setdefault(key, []).append(name)
        shared = {key: value for key, value in values.items() if key in SHARED_KEYS}
        upstreams.append(_upstream(name, where, {**ours, **shared}, around))
    warnings = []
    for key, names in sorted(unknown.items()):
        hint = f'; write it under "{OWN}"' if key in OWN_KEYS else did_you_mean(key, sorted(SHARED_KEYS))
        warnings.append(f"{file}: the key {key!r} of {', '.join(names)} is not known, and is ignored{hint}")
    return Servers(upstreams=_together(file, upstreams), are_named=True, warnings=tuple(warnings))


def parse_tables(tables: Mapping[str, Any], *, file: str, around: Surroundings) -> Servers:
    """Read the tables `[servers.NAME]` of a configuration, which have all keys side by side. Raises `Misuse`."""
    upstreams = []
    for name, values in tables.items():
        where = f"{file}: server {name!r}"
        if not isinstance(values, dict):
            raise Misuse(f"{where} is not a table; write [servers.{name}]")
        _refuse_unknown(where, values, (SHARED_KEYS - {OWN}) | OWN_KEYS | {"env_file"})
        values = {"envFile" if key == "env_file" else key: value for key, value in values.items()}
        upstreams.append(_upstream(name, where, values, around))
    return Servers(upstreams=_together(file, upstreams), are_named=True)


def _refuse_unknown(where: str, values: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in values:
        if key not in known:
            raise Misuse(f"{where}: there is no key {key!r}{did_you_mean(key, sorted(known))}")


def _together(file: str, found: Sequence[Upstream | None]) -> tuple[Upstream, ...]:
    """Return the servers that are not disabled, if there are any and their names differ."""
    upstreams = tuple(one for one in found if one is not None)
    if not upstreams:
        raise Misuse(f"{file} has no servers" if not found else f"{file}: all of its servers are disabled")
    names: dict[str, str] = {}
    for one in upstreams:
        # Files of stores may stand in a folder that does not tell small from capital letters.
        other = names.setdefault(one.name.lower(), one.name)
        if other is not one.name:
            raise Misuse(f"{file}: the names {other!r} and {one.name!r} differ in capital letters only")
    return upstreams


# One server


def program_from(
    argv: Sequence[str], *, env: Sequence[str], cwd: Path | None, era: EraName, around: Surroundings
) -> Upstream:
    """Make an upstream of a command line. `env`: `NAME=VALUE`, or `NAME` of a variable that is set. Raises `Misuse`."""
    entry = _Entry("--env", around)
    variables: dict[str, object] = {}
    for word in env:
        name, equals, value = word.partition("=")
        if not equals and name not in around.environ:
            raise entry.refuse(f"the variable {name!r} is not set; set it, or write {name}=VALUE")
        if not equals:
            value = around.environ[name]
            entry.secrets.add(value)
        variables[name] = Text.plain(value) if not equals else value
    program = Program(argv=tuple(argv), env=entry.variables("", variables), cwd=around.folder / (cwd or ""))
    return Upstream(name=_name_of_program(argv), program=program, era=era, secrets=frozenset(entry.secrets))


def address_from(
    url: str,
    *,
    headers: Sequence[str],
    token_env: str | None,
    token_file: Path | None,
    auth: Auth,
    era: EraName,
    around: Surroundings,
) -> Upstream:
    """Make an upstream of an address, which may have `${VAR}` in it. `headers`: `Name: value`. Raises `Misuse`."""
    pairs = [header.partition(":") for header in headers]
    if not all(colon for _, colon, _ in pairs):  # not what was seen: it may be the token
        raise Misuse("--header: one has no colon; write 'Name: value'")
    values = {
        "url": url,
        "headers": {name.strip(): value.strip() for name, _, value in pairs},
        "token_env": token_env,
        "token_file": None if token_file is None else str(token_file),
        "auth": auth,
    }
    entry = _Entry("TARGET", around)
    address = entry.address({key: value for key, value in values.items() if value is not None})
    return Upstream(name=_name_of_host(url), address=address, era=era, secrets=frozenset(entry.secrets))


def is_launcher(word: str) -> bool:
    """Whether a word is a program that starts servers, such as `npx` or `python`."""
    return _LAUNCHERS.fullmatch(PurePosixPath(word).name) is not None


def _name_of_program(argv: Sequence[str]) -> str:
    """Name a program after its file, or after what a launcher such as `npx` or `python` runs."""
    words = list(argv)
    while is_launcher(words[0]) and len(words) > 1:
        rest = [word for word in words[1:] if not word.startswith("-") and "=" not in word and word not in _SUBCOMMANDS]
        if not rest:
            break
        words = rest
    # `@scope/server@1.2` is the package `server`.
    package = words[0].rstrip("/").rpartition("/")[2]
    return _as_name(_ENDING.sub("", package[:1] + package[1:].partition("@")[0]))


def _name_of_host(url: str) -> str:
    return _as_name(url.partition("://")[2].partition("/")[0].partition("?")[0])


def _as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:MAX_NAME]
    return name if name and name not in RESERVED else "upstream"


def _upstream(name: str, where: str, values: Mapping[str, Any], around: Surroundings) -> Upstream | None:
    """Make an upstream of the members of a server; `None` if it is disabled."""
    entry = _Entry(where, around)
    if entry.flag(values, "disabled", False) or not entry.flag(values, "enabled", True):
        return None
    if not _NAME.fullmatch(name):
        raise entry.refuse(
            f"its name is not a segment of a path: use up to {MAX_NAME} letters, digits, dots, hyphens and underscores,"
            " a letter or digit first"
        )
    if name in RESERVED:
        raise entry.refuse("this name is taken by the resume broker; give the server another one")
    kind = values.get("type")
    if kind == "sse":
        raise entry.refuse('type is "sse": legacy HTTP+SSE is not served; use its Streamable HTTP address with "http"')
    if kind is not None and kind not in tuple(TYPES):  # it may be a list, which has no hash
        raise entry.refuse(f"type is {entry.shown(kind)}; allowed: stdio, http and streamable-http")
    has = {key for key in ("command", "url") if values.get(key)}
    if len(has) != 1:
        raise entry.refuse("it has command and url; keep one of them" if has else "it has neither command nor url")
    [is_a] = has
    if kind is not None and TYPES[kind] != is_a:
        raise entry.refuse(f"type is {entry.shown(kind)}, which needs {TYPES[kind]}, and it has {is_a}")
    for key in _OF_ADDRESS if is_a == "command" else _OF_PROGRAM:
        if values.get(key):
            raise entry.refuse(f"{key} is for a server with {'url' if is_a == 'command' else 'command'}, not {is_a}")
    rerun = values.get("rerun", {})
    if not isinstance(rerun, dict) or not all(isinstance(value, bool) for value in rerun.values()):
        raise entry.refuse("rerun is not an object with true or false for names of tools, such as search_*")
    return Upstream(
        name=name,
        program=entry.program(values) if is_a == "command" else None,
        address=entry.address(values) if is_a == "url" else None,
        rerun=dict(rerun),
        **entry.own(values, _UPSTREAM_KEYS),
        secrets=frozenset(entry.secrets),
    )


class _Entry:
    """Reads the members of one server, and notes the values of variables that it refers to."""

    def __init__(self, where: str, around: Surroundings) -> None:
        self.secrets: set[str] = set()
        self._where = where
        self._around = around

    def refuse(self, sentence: str) -> Misuse:
        return Misuse(masked(self.secrets).sub(MASK, f"{self._where}: {sentence}"))

    @staticmethod
    def shown(value: object) -> str:
        """A value of one of our own keys, or of the type, which hold no secrets."""
        return type(value).__name__ if isinstance(value, dict | list) else json.dumps(value, default=str)

    def flag(self, values: Mapping[str, Any], key: str, default: bool) -> bool:
        value = values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is not true or false")
        return value

    def own(self, values: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
        """Return the values of our keys that are given, as their rules have them."""
        return {key: self._own(key, values[key], rule) for key, rule in rules.items() if key in values}

    def _own(self, key: str, value: object, rule: Rule) -> object:
        found = value
        if rule.kind == "names" and isinstance(value, list):
            found = tuple(value)
        elif (number := NUMBERS.get(rule.kind)) is not None and isinstance(value, str):
            try:
                found = number.parse(value)
            except ValueError as error:
                raise self.refuse(f"{key}: {error}") from None
        if not rule.fits(found):
            raise self.refuse(f"{key} is {self.shown(value)}; allowed: {rule.allowed}")
        return float(found) if rule.kind == "duration" and isinstance(found, int) else found

    def program(self, values: Mapping[str, Any]) -> Program:
        args = values.get("args", [])
        if not isinstance(args, list):
            raise self.refuse("args is not a list of texts")
        argv = (self._fixed("command", values["command"]), *(self._fixed("args", word) for word in args))
        if not argv[0]:
            raise self.refuse("command is empty, because the variable that it names is")
        env: dict[str, object] = {}
        if (path := values.get("envFile")) is not None:
            found = self._around.read_variables(self._path("envFile", path))
            self.secrets.update(found.values())
            env |= {name: Text.plain(value) for name, value in found.items()}
        given = values.get("env", {})
        if not isinstance(given, dict):
            raise self.refuse("env is not an object with a text for each variable")
        cwd = self._path("cwd", values["cwd"]) if "cwd" in values else self._around.folder
        program = Program(
            argv=argv, env=self.variables("env", {**env, **given}), cwd=cwd, **self.own(values, _PROGRAM_KEYS)
        )
        if program.warm and any(text.needs_caller for text in program.env.values()):
            raise self.refuse("env needs a caller's header or principal, and warm starts processes without a caller")
        if program.process == "shared" and any(text.needs_caller for text in program.env.values()):
            raise self.refuse('env needs a caller\'s header or principal, and process = "shared" has none of its own')
        if program.share_state and program.process != "shared":
            raise self.refuse('share_state is for process = "shared", and process is "' + program.process + '"')
        return program

    def address(self, values: Mapping[str, Any]) -> HttpUpstream:
        # The HTTP library is imported here, because programs do not need it.
        from httpx2 import URL, InvalidURL

        from perdure.remote.endpoint import Refused, check_address, is_this_machine

        url = self._fixed("url", values["url"])
        # The errors' own words may quote a part of a password.
        try:
            parsed = URL(url)
        except (InvalidURL, ValueError):
            raise self.refuse("url is not an address such as https://HOST/mcp") from None
        if parsed.userinfo:
            raise self.refuse("url has credentials in it; give them with token_env, token_file or headers")
        try:
            check_address(url)
        except Refused as refused:
            raise self.refuse(str(refused)) from None
        given = values.get("headers", {})
        if not isinstance(given, dict):
            raise self.refuse("headers is not an object with a text for each header")
        headers = {name: self._text(f"header {name}", value, of_caller=True) for name, value in given.items()}
        token_env, token_file = values.get("token_env"), values.get("token_file")
        if token_env is not None:
            if not isinstance(token_env, str) or not _VARIABLE.fullmatch(token_env):
                # Not what was seen: it may be the token.
                raise self.refuse("token_env is not the name of a variable, such as BAKERY_TOKEN")
            self._variable(_TOKEN_ENV, token_env, None)
        address = HttpUpstream(
            url=url,
            headers=headers,
            token_env=token_env,
            token_file=None if token_file is None else self._path("token_file", token_file),
            **self.own(values, _ADDRESS_KEYS),
        )
        self._check_headers(address)
        is_readable = parsed.scheme == "http" and not is_this_machine(parsed.host) and not address.insecure
        if is_readable and address.has_credentials:
            raise self.refuse(
                f"{address.origin} would get headers or credentials over http:, which others can read; use https:, or"
                " set insecure = true for this server in a file of servers"
            )
        return address

    def _check_headers(self, address: HttpUpstream) -> None:
        for name in (*address.headers, *address.pass_headers):
            if not _TOKEN.fullmatch(name):
                raise self.refuse(f"{name!r} is not the name of a header")
            if name.lower() in MADE_HERE:
                raise self.refuse(f"the header {name} is written by Perdure itself; leave it out")
        for name, text in address.headers.items():
            if not all(HEADER_VALUE.fullmatch(value) for kind, value in text.parts if kind == "text"):
                raise self.refuse(f"header {name} has characters that a header cannot have")
        if _AUTHORIZATION in map(str.lower, address.pass_headers):
            raise self.refuse("pass_headers: Authorization is for the gateway, and is never passed on")
        credentials = {
            "a header Authorization": any(name.lower() == _AUTHORIZATION for name in address.headers),
            "token_env": address.token_env is not None,
            "token_file": address.token_file is not None,
            'auth = "pass"': address.auth == "pass",
        }
        given = [name for name, is_given in credentials.items() if is_given]
        if len(given) > 1:
            raise self.refuse(f"it has {' and '.join(given)}, and each is sent as Authorization; keep one of them")

    def variables(self, key: str, given: Mapping[str, object]) -> Texts:
        """Return the variables of a program. A value that is a `Text` already stays as it is."""
        found: dict[str, Text] = {}
        for name, value in given.items():
            if not name or "=" in name or not name.isprintable():
                raise self.refuse(f"{name!r} is not the name of a variable")
            if isinstance(value, int | float) and not isinstance(value, bool):
                value = str(value)
            found[name] = self._text(f"{key} {name}".strip(), value, of_caller=True)
        return found

    def _path(self, key: str, value: object) -> Path:
        return self._around.folder / self._fixed(key, value)

    def _fixed(self, key: str, value: object) -> str:
        return self._text(key, value, of_caller=False).fill()

    def _text(self, key: str, value: object, *, of_caller: bool) -> Text:
        """Put the values of variables into a text. `of_caller`: it may have parts that come from the caller."""
        if isinstance(value, Text):
            return value
        if not isinstance(value, str) or "\0" in value:
            raise self.refuse(f"{key} is not a text")
        parts: list[tuple[Literal["text", "header", "principal"], str]] = []
        # An odd place of the list is between ${ and }.
        for place, part in enumerate(_REFERENCE.split(value)):
            header = _HEADER.fullmatch(part)
            if place % 2 == 0:
                parts.append(("text", part))
            elif part == "principal" or header:
                if not of_caller:
                    raise self.refuse(f"{key} has ${{{part}}}, which may stand in env and headers only")
                if header and header[1].lower() == _AUTHORIZATION:
                    raise self.refuse(
                        f"{key} has ${{{part}}}, which is for the gateway, and is never passed on; have callers send"
                        " another header"
                    )
                parts.append(("header", header[1]) if header else ("principal", ""))
            elif (variable := _VARIABLE.fullmatch(part)) is not None:
                parts.append(("text", self._variable(key, variable[1], variable[2])))
            else:
                forms = "${VAR}, ${VAR:-default}, ${env:VAR}, ${header:NAME} and ${principal}"
                raise self.refuse(f"{key} has ${{{part.partition(':')[0]}…}}, which is not known; allowed: {forms}")
        return Text(tuple(part for part in parts if part != ("text", "")))

    def _variable(self, key: str, name: str, default: str | None) -> str:
        value = self._around.environ.get(name)
        if value is None or (not value and default is not None):
            if default is None:
                remedy = "set it" if key == _TOKEN_ENV else f"set it, or write ${{{name}:-default}}"
                raise self.refuse(f"{key} needs the variable {name}, which is not set; {remedy}")
            return default
        self.secrets.add(value)
        return value


# All of them


def check_serving(upstreams: Sequence[Upstream], *, platform: str, has_tokens: bool, has_issuer: bool) -> None:
    """Raise `Misuse` for upstreams that cannot be served like this. `has_issuer`: the tokens are of an authorization
    server, and are verified."""
    passing = [one.name for one in upstreams if one.passes_tokens]
    if passing and not has_issuer:
        why = "tokens of --tokens are for this gateway alone" if has_tokens else "its callers are not told apart"
        raise Misuse(f'{passing[0]} has auth = "pass", and {why}; serve it with --issuer and --audience')
    if len(passing) > 1:
        raise Misuse(
            f'{passing[0]} and {passing[1]} have auth = "pass", and a token is for one server: the one could use it at'
            " the other; serve each of them by a gateway of its own"
        )
    for one in upstreams:
        if one.program is not None and one.program.process == "shared" and has_tokens and not one.program.share_state:
            raise Misuse(
                f'{one.name} has process = "shared", which gives callers with different tokens one process; use'
                ' "principal", or set share_state = true if each may see what the others do'
            )
        if one.program is not None and one.program.max_memory is not None and platform != "linux":
            raise Misuse(
                f"{one.name} has max_memory, and the memory of processes is measured on Linux only; leave it out"
            )
        if one.program is not None and platform == "win32":
            raise Misuse(f"{one.name} is a program, and on Windows only servers with an address are served")
        if one.needs_principal and not has_tokens:
            raise Misuse(
                f"{one.name} has ${{principal}}, and its callers are not told apart; serve it with --tokens or --issuer"
            )
