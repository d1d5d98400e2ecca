"""The store in memory: the promises of `base` in their shortest form. Uses `errors` and `_core`."""

from perdure.store.memory.store import MemoryStore as MemoryStore
