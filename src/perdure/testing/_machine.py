"""A Hypothesis state machine: made-up histories, on a store and on `MemoryStore` as its model, compared all along."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.testing._values import Make

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine


def store_machine(make: Make, *, durable: bool = True) -> type[RuleBasedStateMachine]:
    """A state machine for the stores that `make` gives; its `TestCase` is what a test runner collects."""
    from perdure.testing._rules import StoreMachine  # Hypothesis is an extra

    return type("StoreMachine", (StoreMachine,), {"make": staticmethod(make), "durable": durable})
