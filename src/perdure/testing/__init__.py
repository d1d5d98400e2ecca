"""Tests whether a store keeps the promises of `perdure.store.base`; uses `store` and the rooms below it.

    def make(name: str) -> Store:
        return MyStore(f"/somewhere/{name}")      # the same name: the same data

    async def test_my_store_keeps_the_promises() -> None:
        await check_store(make)

    TestMyStore = store_machine(make).TestCase    # needs the extra: pip install perdure[testing]

`check_store` runs one check for each thing promised, on a fresh store each, and raises `AssertionError` with the number
of the promise and what was seen. `store_machine` is a Hypothesis state machine: it makes up histories and compares the
store with `MemoryStore` after each step.
"""

from perdure.testing._checks import check_store, store_machine

__all__ = ["check_store", "store_machine"]
