"""The connection of an operator beside those of stores."""

from tests.support.stores.postgres_roles import operator

__all__ = ["operator"]
