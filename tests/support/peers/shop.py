"""The effects of one tool, for engines that run it each in their own way. It needs the standard library alone.

Each effect adds a line to a file. The process kills itself once, at the point that `SHOP_POINT` names: `in charge`
before the effect, `behind charge` after it, `after charge`, when the tool has its value.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

STEPS = ("price", "charge", "mail")


def die_at(point: str) -> None:
    died = Path(os.environ["SHOP_FOLDER"], "died")
    if point == os.environ["SHOP_POINT"] and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def effect(name: str) -> str:
    die_at(f"in {name}")
    with Path(os.environ["SHOP_FOLDER"], "effects").open("a") as effects:
        effects.write(f"{name}\n")
    die_at(f"behind {name}")
    return name


def effects_in(folder: Path) -> Counter[str]:
    path = folder / "effects"
    return Counter(path.read_text().split() if path.exists() else ())
