"""What a file in `hosts` says of its host: what to install, how to configure it in an empty home, how to start it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: What the user asks. The model follows its script whatever it reads.
PROMPT = "Use the tools of the bakery."
#: The bakery's name in the configurations of hosts.
NAME = "bakery"
_LIBRARY = "is a library: the program around it keeps the conversation"
#: What libraries are left out of.
KEPT_BY_PROGRAM = dict.fromkeys(("host_again", "host_again_early", "stdio_host_again_early"), _LIBRARY)

#: The limit of hosts that are built on the Python SDK.
TWICE = "tries twice to resume a call, 5 s (`retry`) apart"


@dataclass(frozen=True)
class Place:
    """Where a host is to run."""

    installed: Path
    home: Path
    """Empty before the host's first start, and the host's working directory."""
    model: str
    """The address of the model, without a path."""
    url: str
    """The address of the bakery."""
    is_stdio: bool
    """Whether the host is to start `perdure stdio` in place of using the address."""

    @property
    def stdio(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "perdure", "stdio", self.url, "--instance", NAME)

    def write(self, path: str, text: str) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@dataclass(frozen=True)
class Start:
    """How a host is started."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    terminal: bool = False
    """Whether it needs a terminal."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """What is typed when the terminal shows a text (without its spaces), each once."""
    idle: str = ""
    """What the terminal shows (without spaces) at the end of a turn. The prompt is typed again if the model was not
    offered its tool: a host with a terminal asks its model while it still connects."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host."""

    name: str
    registry: str
    """`npm` or `pypi`."""
    packages: Mapping[str, str]
    """Each package with its version; the first one is the host."""
    start: Callable[[Place], Start]
    """Write the configuration, and say how to start it with the prompt."""
    again: Callable[[Place], Start] | None = None
    """How to start it again so that it goes on with its conversation; None: it keeps none."""
    asks: Callable[[Place], Start] | None = None
    """How to start it so that it asks its user what a tool asks; None: it always does, or never."""
    client: str = "mcp"
    """Its name in `clientInfo`, by which a rule of `answer_within` knows it; `mcp` is the Python SDK's own."""
    options: Sequence[str] = ()
    """Of the server that it is played with."""
    own_limits: Mapping[str, str] = field(default_factory=dict)
    """Why a scenario ends with neither a result nor -31001: the host's own limit, by the scenario's name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a scenario cannot be played with it, by the scenario's name."""

    @property
    def version(self) -> str:
        return next(iter(self.packages.values()))
