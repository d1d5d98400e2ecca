"""Room for no token: resume is off, by the user's wish or because nothing could be kept."""

from __future__ import annotations


class NoSlot:
    """Looks like a slot (`stdio/tokens.py`) and keeps nothing, so that nobody has to ask (T6)."""

    holder = ""
    notes = None

    def token(self) -> str | None:
        return None

    def keep(self, token: str, /) -> bool:
        return False

    def resumed(self) -> None:
        return None

    def drop(self) -> None:
        return None

    def forget(self) -> None:
        return None

    def release(self) -> None:
        return None
