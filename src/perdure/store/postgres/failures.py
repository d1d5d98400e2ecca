"""Names the failures of a PostgreSQL server and its driver (promise 9)."""

import contextlib
from collections.abc import Iterator

import asyncpg

from perdure.errors import StoreError, StoreUnavailable

NAMED = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    ValueError,
    TypeError,
    UserWarning,
)
"""The driver's exceptions; each leaves the store as a `StoreError`. (`TimeoutError` is an `OSError`; values that cannot
be encoded are a `ValueError` or a `TypeError`; a password file that others can read is a `UserWarning`.)"""

AGAIN = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""Two transactions conflicted, and nothing was done: the statement is tried again."""

BURIED = "PD001"
"""The code that `refuse_buried_1` raises, with the names of buried nodes."""

UNKNOWN = "PD002"
"""The same for nodes that the server has lost with its last moments."""

_OF_THE_SERVER = ("08", "25", "40", "53", "55", "57", "58", BURIED, UNKNOWN)
"""Classes of conditions that may pass: connection, a transaction's state (the server only reads: another one has become
the primary), rollback, resources, lock, operator's intervention, system error, and nodes that were buried or lost."""

_OF_AN_OPERATOR = ("28", "3D", "3F", "42501", "42883", "42P01")
"""What an operator takes away and gives back while processes serve: the role's login or password, the database, the
schema, rights, functions and tables (a dump is restored, for example). The steps themselves are right."""

_OF_THE_MOMENT = (*_OF_THE_SERVER, *_OF_AN_OPERATOR)


def is_unknown(error: BaseException | None) -> bool:
    """Whether the server refused something because it has lost the node that asks."""
    return getattr(error, "sqlstate", None) == UNKNOWN


NOT_POSTGRES = "what answers there may not be PostgreSQL"

_ADVICE = {
    "rejected SSL upgrade": f"it takes no TLS, or {NOT_POSTGRES}",
    "unexpected connection_lost() call": NOT_POSTGRES,
    "unsupported startup parameter": "the pooler takes no such setting: leave it out of the address, and set it for"
    " the role with ALTER ROLE … SET",
    "statement pooling mode": "the pooler takes no transactions: make or migrate the schema with `perdure store init`"
    " or `migrate` at an address past it",
}
"""Advice for errors of the driver and of PgBouncer, by a part of their text."""


@contextlib.contextmanager
def named(shown: str, doing: str) -> Iterator[None]:
    """Raise the driver's exceptions as named failures, with their cause: `StoreUnavailable` where trying again may
    help, else `StoreError`."""
    try:
        yield
    except StoreError:
        raise
    except NAMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "".join(f"; {advice}" for part, advice in _ADVICE.items() if part in reason)
        state = getattr(error, "sqlstate", None) or ""
        if isinstance(error, asyncpg.PostgresError) and state:
            may_pass = state.startswith(_OF_THE_MOMENT)
        else:
            may_pass = isinstance(error, asyncpg.ClientConfigurationError) or not isinstance(
                error, asyncpg.DataError | ValueError | TypeError
            )
        sentence = f"the database {shown} cannot be {doing}: {reason}{advice}"
        raise (StoreUnavailable if may_pass else StoreError)(sentence) from error
