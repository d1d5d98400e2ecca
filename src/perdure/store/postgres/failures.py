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
"""What may come out of the driver; each leaves the store as a `StoreError`. (`TimeoutError` is an `OSError`; values
that cannot be encoded are a `ValueError` or a `TypeError`; a password file that others can read is a `UserWarning`.)"""

AGAIN = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""Two transactions were in each other's way, and nothing was done: the same is tried again."""

BURIED = "PD001"
"""What `refuse_buried_1` raises, with the names of the nodes."""

UNKNOWN = "PD002"
"""The same for nodes that the server has lost, with what came after they had joined."""

_OF_THE_SERVER = ("08", "25", "40", "53", "55", "57", "58", BURIED, UNKNOWN)
"""Classes of conditions that may pass: connection, a transaction's state (the server only reads: another one has become
the primary), rollback, resources, lock, operator's intervention, system error, and nodes that were buried or lost."""

_OF_AN_OPERATOR = ("28", "3D", "3F", "42501", "42883", "42P01")
"""What an operator takes away and gives back while processes serve: the role's login or password, the database, the
schema, rights, functions and tables (a dump is put back, for example). It is not of the steps that it meets."""

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
"""What to do about sentences of the driver and of PgBouncer, by a part of each."""


def failure(error: BaseException, shown: str, doing: str) -> StoreError:
    """Give the named failure for a driver's exception: unavailable where trying again may help, else refused."""
    reason = " ".join(str(error).split()) or type(error).__name__
    advice = "".join(f"; {advice}" for part, advice in _ADVICE.items() if part in reason)
    sentence = f"the database {shown} cannot be {doing}: {reason}{advice}"
    state = getattr(error, "sqlstate", None) or ""
    if isinstance(error, asyncpg.PostgresError) and state:
        return (StoreUnavailable if state.startswith(_OF_THE_MOMENT) else StoreError)(sentence)
    is_of_values = isinstance(error, asyncpg.DataError | ValueError | TypeError) and not isinstance(
        error, asyncpg.ClientConfigurationError
    )
    return StoreError(sentence) if is_of_values else StoreUnavailable(sentence)


@contextlib.contextmanager
def named(shown: str, doing: str) -> Iterator[None]:
    """Let the driver's exceptions leave as ours, with their cause."""
    try:
        yield
    except StoreError:
        raise
    except NAMED as error:
        raise failure(error, shown, doing) from error
