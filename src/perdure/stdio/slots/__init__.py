"""Finds the locked token file of this bridge, and keeps its resume token there.

    slot = await open_slot(directory, identity, target)
    token = slot.token()      # offer it; then slot.on_accepted() or slot.on_rejected()
    slot.keep(token)          # each time the broker gives a new one; confirm it if this was True
    slot.release()            # at the end: the next bridge may have it

`files` names a slot's files, `choice` picks the slot of a new bridge and removes what dead hosts left, `slot` is the
one that a bridge holds. The bridge never asks whether resume is on (T6): `NoSlot` looks the same and keeps nothing.
"""

from perdure.stdio.slots.files import Target
from perdure.stdio.slots.slot import KeptSlot, NoSlot, Slot, default_directory, open_slot

__all__ = ["KeptSlot", "NoSlot", "Slot", "Target", "default_directory", "open_slot"]
