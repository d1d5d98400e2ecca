"""The revisions that we serve are those that the SDK negotiates, and each has its own behaviour."""

import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from perdure._core.revisions import REVISIONS, is_sessionless


def test_we_serve_every_revision_that_the_sdk_opens_a_session_for() -> None:
    """P8: a release of the SDK that adds one must not slip past our table."""
    assert tuple(REVISIONS) == HANDSHAKE_PROTOCOL_VERSIONS


def test_only_2025_03_26_has_batches() -> None:
    """A7"""
    assert [revision.version for revision in REVISIONS.values() if revision.batches] == ["2025-03-26"]


def test_only_2025_11_25_primes_and_closes_early() -> None:
    """A9, A11"""
    assert [revision.version for revision in REVISIONS.values() if revision.primes] == ["2025-11-25"]
    assert [revision.version for revision in REVISIONS.values() if revision.closes_early] == ["2025-11-25"]


@pytest.mark.parametrize("version", [*MODERN_PROTOCOL_VERSIONS, "2026-07-29", "2027-01-01", "9999-12-31"])
def test_2026_07_28_and_later_dates_have_no_sessions(version: str) -> None:
    assert is_sessionless(version)


@pytest.mark.parametrize(
    "version", [*REVISIONS, "2026-07-27", "", "latest", "2026-7-28x", "２０２７-01-01", "20270101--"]
)
def test_everything_else_is_not_of_that_era(version: str) -> None:
    assert not is_sessionless(version)
