"""Tests whether a store keeps the promises of `perdure.store.interface`; uses `store` and the rooms below it.

    def make(name: str) -> Store:
        return MyStore(f"/somewhere/{name}")      # the same name: the same data

    async def test_my_store_keeps_the_promises() -> None:
        await check_store(make)

`check_store` runs one check for each thing promised, on a fresh store each, and raises `AssertionError` with the number
of the promise and what was seen.
"""

from perdure.testing._checks import check_store as check_store
