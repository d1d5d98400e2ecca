"""Bearer tokens from a file: who is let in, and which files are refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier

from perdure.errors import Misuse
from perdure.serve.token_file import MAX_FILE, FileTokens, is_open_to_others

ALICE = "alice-token-0123456789"
ALICE_NEW = "alice-token-9876543210"
BOB = "bob-token-0123456789ab"

Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(text: str | bytes, mode: int = 0o600) -> Path:
        path = tmp_path / "tokens"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    return write


def who(tokens: TokenVerifier, token: str) -> AccessToken | None:
    return asyncio.run(tokens.verify_token(token))


def test_a_token_names_its_principal_and_two_tokens_may_name_one(write: Writer) -> None:
    tokens = FileTokens(write(f"# ours\n\nalice:{ALICE}\r\n  alice : {ALICE_NEW}  \nbøb:{BOB}"))
    for token, principal in [(ALICE, "alice"), (ALICE_NEW, "alice"), (BOB, "bøb")]:
        assert who(tokens, token) == AccessToken(token=token, client_id=principal, subject=principal, scopes=[])


@pytest.mark.parametrize("token", ["", ALICE[:-1], ALICE + " ", ALICE.upper(), "alice", "\udc80", "ø" * 20])
def test_any_other_token_names_nobody(write: Writer, token: str) -> None:
    assert who(FileTokens(write(f"alice:{ALICE}")), token) is None


def test_what_is_kept_shows_no_token(write: Writer) -> None:
    tokens = FileTokens(write(f"alice:{ALICE}"))
    assert ALICE not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a-line-without-any-mark", "no colon; each line is principal:token"),
        (f":{ALICE}", "no principal before the colon"),
        ("carol:", "no token after the colon"),
        ("carol:fifteen-letters", "the token has 15 characters; fewer than 16 could be guessed"),
        (f"carol:{ALICE}ø", "the token has blanks or other characters than visible ASCII"),
        (f"carol:{ALICE} # mine", "the token has blanks or other characters than visible ASCII"),
        (f"urn:carol:{ALICE}", "more than one colon"),
        (f"ca\x07rol:{ALICE}x", "the principal has characters that cannot be shown"),
        (f"carol:{BOB}", "this token already belongs to another principal, 'bob'"),
    ],
)
def test_a_bad_line_is_refused_with_its_place_and_without_the_token(write: Writer, line: str, reason: str) -> None:
    path = write(f"bob:{BOB}\n# next comes the bad one\n{line}\n")
    with pytest.raises(Misuse) as told:
        FileTokens(path)
    assert str(told.value).startswith(f"{path}:3: {reason}")
    for secret in (ALICE, BOB, "fifteen-letters", "a-line-without-any-mark"):
        assert secret not in str(told.value)


ENTRY = f"bob:{BOB}\n"


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("carol:sixteen-letters-", "sixteen-letters-"),
        (ENTRY + ENTRY, BOB),
        ("\ufeff" + ENTRY, BOB),
        (ENTRY.ljust(MAX_FILE, "#"), BOB),
    ],
    ids=["of the least length", "twice the same line", "a byte order mark", "of the largest size"],
)
def test_a_file_that_is_just_good_enough_is_read(write: Writer, text: str, token: str) -> None:
    found = who(FileTokens(write(text)), token)
    assert found is not None
    assert found.client_id in ("bob", "carol")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no token, so every request would be refused"),
        ("# nobody yet\n\n", "has no token, so every request would be refused"),
        (ENTRY.ljust(MAX_FILE + 1, "#"), "is larger than 1 MiB"),
        (b"bob:\xff\xfe", "is not UTF-8 text"),
    ],
    ids=["empty", "comments only", "too large", "no text"],
)
def test_a_file_that_is_no_list_of_tokens_is_refused(write: Writer, text: str | bytes, reason: str) -> None:
    with pytest.raises(Misuse, match=reason):
        FileTokens(write(text))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o777])
def test_a_file_that_others_can_use_is_refused(write: Writer, mode: int) -> None:
    with pytest.raises(Misuse, match=rf"can be used by others than its owner \(mode {mode:04o}\)"):
        FileTokens(write(f"bob:{BOB}", mode))


@pytest.mark.parametrize(
    ("mode", "owner", "is_open"),
    [(0o440, 0, False), (0o640, 0, False), (0o444, 0, True), (0o460, 0, True), (0o441, 0, True), (0o440, 1000, True)],
)
def test_a_file_of_root_may_be_read_by_a_group_of_the_process(mode: int, owner: int, is_open: bool) -> None:
    """As Kubernetes gives a secret to a process that is not root. To root itself, root's file is its own."""
    assert is_open_to_others(mode, owner=owner, reader=1000) is is_open
    assert is_open_to_others(0o440, owner=0, reader=0)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(write: Writer, mode: int) -> None:
    assert who(FileTokens(write(f"bob:{BOB}", mode)), BOB)


def test_a_link_is_judged_by_the_file_it_leads_to(write: Writer, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(write(f"bob:{BOB}"))
    assert who(FileTokens(link), BOB)
    write(f"bob:{BOB}", 0o644)
    with pytest.raises(Misuse, match="can be used by others"):
        FileTokens(link)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(Misuse, match="is not a regular file"):
        FileTokens(tmp_path / "pipe")


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"cannot read the tokens in .*: Is a directory"):
        FileTokens(tmp_path)
    with pytest.raises(Misuse, match=r"cannot read the tokens in .*: No such file or directory"):
        FileTokens(tmp_path / "none")
