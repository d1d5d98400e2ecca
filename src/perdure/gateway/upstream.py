"""Describes upstreams: the servers behind the gateway, with their limits, as frozen values.

A field with a `Rule` is a key of the configuration (`gateway.config`), under its own name. No `repr` shows arguments,
variables or headers, because any of them may hold a secret.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from perdure._core.settling import may_run_again
from perdure.settings import NUMBERS, Rule

EraName = Literal["auto", "session", "2026-07-28"]
OnRestart = Literal["keep", "end"]
Process = Literal["session", "principal", "shared"]
Auth = Literal["own", "pass"]

MIN_MASKED = 4
"""Characters of the shortest value that is masked: shorter ones (`1`, `on`) are in every other word of a log."""


MASK = "***"


def masked(secrets: Collection[str]) -> re.Pattern[str]:
    """A pattern that fits the values that are masked: as they are, line by line, because a log has lines, and as JSON
    has them."""
    texts = {text for secret in secrets for text in (secret, *map(str.strip, secret.splitlines()))}
    forms = {form for text in texts for form in (text, *_as_json(text))}
    # The longest first: one value may be a part of another. Without a value it fits nothing.
    values = sorted((one for one in forms if len(one) >= MIN_MASKED), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, values)) or r"(?!)")


def _as_json(text: str) -> tuple[str, str]:
    return json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


class CallerLacks(Exception):
    """The caller does not bring what a configured text needs of it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the request has no {what}")
        self.what = what
        """`header NAME`, or `principal`."""


@dataclass(frozen=True, repr=False)
class Text:
    """A configured text. Parts of it may come from the caller."""

    parts: tuple[tuple[Literal["text", "header", "principal"], str], ...]
    """The kind of each part, and its text or the header's name."""

    @classmethod
    def plain(cls, text: str) -> "Text":
        return cls((("text", text),))

    @property
    def needs_caller(self) -> bool:
        return any(kind != "text" for kind, _ in self.parts)

    def fill(self, headers: Mapping[str, str] | None = None, principal: str = "") -> str:
        """Return the text for one caller. `headers`: of its request, by names in small letters. Raises
        `CallerLacks`."""

        return "".join(self._parts(headers or {}, principal))

    def given(self, headers: Mapping[str, str], principal: str) -> set[str]:
        """The parts that come from one caller. Raises `CallerLacks`."""
        parts = zip(self.parts, self._parts(headers, principal), strict=True)
        return {given for (kind, _), given in parts if kind != "text"}

    def _parts(self, headers: Mapping[str, str], principal: str) -> Iterator[str]:
        for kind, value in self.parts:
            found = value
            if kind != "text":
                found = principal if kind == "principal" else headers.get(value.lower(), "")
            if not found and kind != "text":
                raise CallerLacks("principal" if kind == "principal" else f"header {value}")
            yield found


Texts = Mapping[str, Text]


def _key(default: Any, why: str, *, kind: Any = "", low: float | None = None, high: float | None = None) -> Any:
    """A key of the configuration. In place of a default there may be the choices, as a `Literal`: the first is the
    default. `None` is *off*; its kind has to be named."""
    choices = get_args(default)
    default = choices[0] if choices else default
    kinds: dict[type, str] = {float: "duration", int: "count", bool: "flag", str: "choice", tuple: "names"}
    kind = kind or kinds[type(default)]
    number = NUMBERS.get(kind)
    low = low if low is not None or number is None else number.low
    high = high if high is not None or number is None else number.high
    rule = Rule(kind=kind, group="", why=why, low=low or 0, high=high or 0, choices=choices)
    return field(default=default, metadata={"rule": rule})


def keys_of(kind: type) -> dict[str, Rule]:
    """Return the keys of the configuration that one of these classes has."""
    fields = dataclasses.fields(kind)
    return {one.name: one.metadata["rule"] for one in fields if "rule" in one.metadata}


MOST_PROCESSES = 10_000
"""Of one gateway process: each has three pipes, and systems give a process some 65,000 files."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Program:
    """An upstream that is started here and spoken to over its stdin and stdout."""

    argv: tuple[str, ...]
    env: Texts = field(default_factory=dict)
    cwd: Path
    inherit_env: bool = _key(False, "give the program all variables of the gateway, without its own `PERDURE_…`")
    warm: int = _key(0, "processes that are started before they are needed", low=0, high=MOST_PROCESSES)
    process: Process = _key(Process, "the sessions that share a process: none, those of one principal, or all")  # noqa: RUF009
    share_state: bool = _key(False, "let callers with different tokens share a process")
    start_timeout: float = _key(60.0, "how long the program may take to answer the handshake")
    max_processes: int = _key(64, "processes at once in one gateway process; 503 beyond", high=MOST_PROCESSES)
    max_caller_processes: int = _key(16, "of one principal, or one address without; 429 beyond", high=MOST_PROCESSES)
    max_memory: int | None = _key(
        None,
        "memory of a process and of all that it has started; one that takes more is ended. Linux only",
        kind="bytes",
        low=1 << 20,
        high=1 << 50,
    )
    process_idle: float | None = _key(
        None,
        "how long a process with nothing to do lives; without it as long as its session is loaded",
        kind="duration",
    )
    ping_timeout: float = _key(30.0, "how long a process whose requests were all cancelled may take to answer a ping")
    lanes: int | None = _key(
        None, "processes at once for the 2026-07-28 calls of one caller; 1 keeps state", kind="count"
    )

    def __repr__(self) -> str:
        return f"Program({self.argv[0]!r})"


@dataclass(frozen=True, kw_only=True, repr=False)
class HttpUpstream:
    """An upstream that runs elsewhere and is spoken to over Streamable HTTP."""

    url: str
    headers: Texts = field(default_factory=dict)
    """Sent with each request."""
    token_env: str | None = None
    """The variable that holds the bearer token."""
    token_file: Path | None = None
    """The file that holds it; read again when the upstream refuses the token."""
    auth: Auth = _key(Auth, "whose credentials it gets: those of the gateway, or the token of each caller")  # noqa: RUF009
    pass_headers: tuple[str, ...] = _key(
        (), "headers of the client that are passed on, as its session began; never `Authorization`"
    )
    insecure: bool = _key(False, "let credentials go over `http:` to another machine")

    def __repr__(self) -> str:
        return f"HttpUpstream({self.origin!r})"

    @property
    def origin(self) -> str:
        """The address without its path and query, which may hold a secret."""
        return urlsplit(self.url)._replace(path="", query="", fragment="").geturl()

    @property
    def has_credentials(self) -> bool:
        """Whether requests carry anything beside the protocol. Any header counts: its name does not tell."""
        own = self.headers or self.token_env is not None or self.token_file is not None
        return bool(own or self.gets_callers_headers)

    @property
    def gets_callers_headers(self) -> bool:
        """Whether something of a caller's request goes along as it is."""
        return self.auth == "pass" or bool(self.pass_headers)


@dataclass(frozen=True, kw_only=True, repr=False)
class Upstream:
    """A server behind the gateway: a program or an address."""

    name: str
    """A segment of its path, `/mcp/NAME`."""
    program: Program | None = None
    address: HttpUpstream | None = None
    era: EraName = _key(EraName, "the revisions that it is spoken to in; `auto` finds out")  # noqa: RUF009
    patience: float = _key(30.0, "how long a request that did not run waits for an upstream that is away", low=0)
    call_timeout: float | None = _key(
        None, "how long a request may take; without it as long as it takes", kind="duration"
    )
    rerun: Mapping[str, bool] = field(default_factory=dict)
    """Whether tools may run again, by patterns of their names, in place of what they say of themselves."""
    on_restart: OnRestart = _key(OnRestart, "whether a session goes on with a new process, or ends")  # noqa: RUF009
    secrets: frozenset[str] = frozenset()
    """Values that came from variables."""

    def __post_init__(self) -> None:
        if (self.program is None) == (self.address is None):
            raise ValueError("an upstream is a program or an address")

    def __repr__(self) -> str:
        return self.mask(f"Upstream({self.name!r}, {self.program or self.address!r})")

    @property
    def is_program(self) -> bool:
        return self.program is not None

    @property
    def passes_tokens(self) -> bool:
        """Whether it gets the token of each caller."""
        return self.address is not None and self.address.auth == "pass"

    @cached_property
    def needs_caller(self) -> bool:
        """Whether something that it gets comes from the request of a caller."""
        passes = self.address is not None and self.address.gets_callers_headers
        return passes or any(text.needs_caller for text in self._texts.values())

    @property
    def needs_principal(self) -> bool:
        return any(kind == "principal" for text in self._texts.values() for kind, _ in text.parts)

    @property
    def _texts(self) -> Texts:
        """The variables of a program, or the headers for an address."""
        return self.program.env if self.program is not None else self.address.headers if self.address else {}

    def values_for(self, headers: Mapping[str, str], principal: str) -> Mapping[str, str]:
        """Return the variables of a program, or the headers for an address, for one caller. Raises `CallerLacks`."""
        return self._passed(headers) | {name: text.fill(headers, principal) for name, text in self._texts.items()}

    def _passed(self, headers: Mapping[str, str]) -> dict[str, str]:
        names = () if self.address is None else self.address.pass_headers
        return {name: headers[name.lower()] for name in names if name.lower() in headers}

    def secrets_of(self, headers: Mapping[str, str], principal: str) -> frozenset[str]:
        """Return the parts of `values_for` that come from the caller, who may repeat one of them alone. Raises
        `CallerLacks`."""
        given = (text.given(headers, principal) for text in self._texts.values())
        return frozenset(self._passed(headers).values()).union(*given)

    @property
    def shown(self) -> str:
        """The program, without its arguments, or the address, as it may be shown."""
        if self.address is not None:
            return self.mask(urlsplit(self.address.url)._replace(query="", fragment="").geturl())
        return self.mask(self.program.argv[0] if self.program is not None else "")

    @cached_property
    def _masked(self) -> re.Pattern[str]:
        return masked(self.secrets)

    def mask(self, text: str) -> str:
        """Replace the values that came from variables, in a text that is logged or shown, by `***`."""
        return self._masked.sub(MASK, text)

    def rerun_rule(self, tool: str) -> str | None:
        """Return the pattern of `rerun` that decides for a tool: its own name, else the longest one that fits."""
        fitting = [pattern for pattern in self.rerun if fnmatchcase(tool, pattern)]
        return max(fitting, key=lambda pattern: (pattern == tool, len(pattern)), default=None)

    def may_run_again(self, tool: Mapping[str, Any]) -> bool:
        """Whether a tool, as `tools/list` shows it, may run a second time."""
        rule = self.rerun_rule(str(tool.get("name")))
        return may_run_again(tool) if rule is None else self.rerun[rule]
