"""Classifies a process above the bridge: an MCP host, a launcher on the way from the host, or a process manager.

Hosts start the bridge through `uvx`, `npx` or a shell. These are new processes with each start, so a session cannot be
found again by them; the host above them stays. A launcher is known by its command line alone:

| program | is a launcher if |
|---|---|
| `uv`, `uvx` | it runs something (`uvx …`, `uv run …`, `uv tool run …`) |
| `npx`, `npm` | it is `npx …`, `npm exec …` or `npm x …` |
| `pipx` | it is `pipx run …` |
| `env` | what follows its options and variables would be a launcher, or is the bridge |
| a shell | its `-c` is one such command, after `cd`, `export` and the like at most; or its script is `perdure` |
| Python, Node | its script or module is the bridge, or one of the above (`python -m uv`, `node …/npx-cli.js`) |
| `perdure` | it is `perdure stdio …` (a wrapper of that name) |

Nothing else is one. To take a launcher for a host costs a resume: the session starts fresh. To take a host for a
launcher could mix the sessions of two hosts that have the same parent. So every doubt is decided for the host.

A **manager** adopts the children of other processes, or starts whatever a user logs in to. It is not a host, and the
host that was there is not known.
"""

import enum
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from posixpath import basename

Rule = Callable[[Sequence[str]], bool]
"""Whether a program starts the bridge when it is called with these words."""


class ProcessKind(enum.Enum):
    """The kind of a process above the bridge."""

    HOST = "host"  #: the bridge is its child, with launchers in between at most
    LAUNCHER = "launcher"  #: only starts the bridge; its parent is classified next
    MANAGER = "manager"  #: starts or adopts anything, so it is not a host


#: Processes of any session, and those that adopt orphans. What is written to `comm` has 15 characters on Linux.
MANAGERS = frozenset(
    {"init", "systemd", "launchd", "openrc-init", "upstart", "runit", "runsv", "runsvdir", "s6-svscan", "s6-supervise"}
    | {"tini", "tini-static", "dumb-init", "docker-init", "catatonit", "conmon"}
    | {"containerd-shim", "containerd-shim-runc-v2"}
    | {"login", "sshd", "sshd-session", "sshd-auth", "loginwindow", "lightdm", "sddm-helper"}
    | {"gdm-session-worker", "gdm-session-wor", "gnome-session-binary", "gnome-session-b"}
    | {"gnome-session-service", "gnome-session-s", "ksmserver", "plasma_session"}
    | {"xfce4-session", "lxsession", "lxqt-session", "mate-session"}
)

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=.*", re.DOTALL)
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?t?)?", re.IGNORECASE)
_SUFFIX = re.compile(r"\.(py|pyz|js|mjs|cjs|sh)$")
_OPERATOR = re.compile(r"[();<>|&]+")

#: What a shell may do before it starts the bridge. It starts nothing that could be the host.
_PREPARATIONS = frozenset({"cd", "export", "unset", "source", ".", "umask", "ulimit", "set"})

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "ash", "fish")
_ENV_VALUED = frozenset({"-u", "--unset", "-C", "--chdir", "-P"})
_PYTHON_VALUED = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_NODE_VALUED = frozenset({"-r", "--require", "--import", "--loader", "--experimental-loader", "-C", "--conditions"})
_SHELL_VALUED = frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})


def classify(*, name: str, words: Sequence[str]) -> ProcessKind:
    """Classify a process by the name that the system has for it and its command line."""
    if name in MANAGERS or (words and basename(words[0]) in MANAGERS):
        return ProcessKind.MANAGER
    # npm replaces its command line by a title: one word that holds them all, and nothing in the room that is left.
    if words and words[0].startswith(("npm exec ", "npm x ")) and not any(words[1:]):
        words = words[0].split()
    try:
        return ProcessKind.LAUNCHER if starts_bridge(words) else ProcessKind.HOST
    except RecursionError:  # thousands of `env` in a row
        return ProcessKind.HOST


def starts_bridge(words: Sequence[str]) -> bool:
    """Whether a command line is only there to start the bridge, or is the bridge's own."""
    if not words:
        return False
    program = _program(words[0])
    rule = _RULES.get("python" if _PYTHON.fullmatch(program) else program)
    return rule is not None and rule(words[1:])


def is_script(words: Sequence[str]) -> bool:
    """Whether a shell or an interpreter runs a script, such as one that users write around the bridge."""
    program = _program(words[0]) if words else ""
    is_interpreter = program in _SHELLS or bool(_PYTHON.fullmatch(program))
    return is_interpreter and any(not word.startswith("-") for word in words[1:])


def _program(word: str) -> str:
    """`/usr/bin/perdure`, `-bash`, `bin/perdure.js`, `site-packages/perdure/__main__.py`: the name that matters."""
    name = basename(word.removesuffix("/__main__.py"))
    return _SUFFIX.sub("", name).removeprefix("-")


def _begins_with(*subcommands: str) -> Rule:
    """Return the rule that a subcommand stands first. After an option there is doubt: the word may be its value."""
    return lambda words: bool(words) and words[0] in subcommands


def _python(words: Sequence[str]) -> bool:
    """Python ends its options with the script or with `-m`, which may stand at the end of others (`-Im perdure`)."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option[-1] in "mc" and not option.startswith("--"):
            return option[-1] == "m" and _script(rest)
        rest = rest[1:] if option in _PYTHON_VALUED else rest
    return _script(rest)


def _script(words: Sequence[str]) -> bool:
    """A script or module that an interpreter runs: it stands for a program of its name."""
    return bool(words) and not words[0].startswith("-") and starts_bridge(words)


def _shell(words: Sequence[str]) -> bool:
    rest = list(words)
    while rest and rest[0][:1] in {"-", "+"} and rest[0] not in {"-", "--"}:
        option = rest.pop(0)
        letters = "" if option.startswith("--") else option[1:]
        if option[0] == "-" and "c" in letters:
            rest = list(_after_options(rest, _SHELL_VALUED))
            return bool(rest) and _line_starts_bridge(rest[0])
        if "s" in letters:
            return False  # its commands come from elsewhere
        # `-euo pipefail`: the last letter takes a value.
        rest = rest[1:] if option in _SHELL_VALUED or letters[-1:] in {"o", "O"} else rest
    return bool(rest) and _program(rest[0]) == "perdure" and starts_bridge(rest)


def _line_starts_bridge(line: str) -> bool:
    """Whether the last command of a shell's line starts the bridge, and those before it only prepare that.

    Several lines, pipes, jobs, alternatives, groups and substitutions may start anything.
    """
    if "\n" in line.strip() or "`" in line:
        return False
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:  # a quote that does not end
        return False
    commands: list[list[str]] = [[]]
    for token in tokens:
        if token in {";", "&&"}:
            commands.append([])
        elif not _OPERATOR.fullmatch(token):
            commands[-1].append(token)
        elif token not in {">", ">>", ">&"}:
            return False
    if not commands[-1] and tokens and tokens[-1] == ";":
        commands.pop()
    *before, last = commands
    prepares = all(one and (one[0] in _PREPARATIONS or all(map(_ASSIGNMENT.fullmatch, one))) for one in before)
    begins = dropwhile(lambda word: word in {"exec", "command"} or _ASSIGNMENT.fullmatch(word), last)
    return prepares and starts_bridge(list(begins))


def _after_options(words: Sequence[str], valued: frozenset[str]) -> Sequence[str]:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        rest = rest[1:] if option in valued else rest
    return rest


_RULES: Mapping[str, Rule] = {
    "perdure": _begins_with("stdio"),
    # Options with values may stand first (`uv --directory PATH run …`); uv starts nothing else that stays.
    "uv": lambda words: "run" in words or "uvx" in words,
    **dict.fromkeys(("uvx", "npx", "npx-cli"), bool),
    **dict.fromkeys(("npm", "npm-cli"), _begins_with("exec", "x")),
    "pipx": _begins_with("run"),
    "env": lambda words: starts_bridge(list(dropwhile(_ASSIGNMENT.fullmatch, _after_options(words, _ENV_VALUED)))),
    "python": _python,
    **dict.fromkeys(("node", "nodejs"), lambda words: _script(_after_options(words, _NODE_VALUED))),
    **dict.fromkeys(_SHELLS, _shell),
}
