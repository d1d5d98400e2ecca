"""Weighs steps before they are written: how many rows and bytes they are."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store.base import (
    Append,
    ChangeSession,
    DropStream,
    EndSession,
    Forward,
    OpenAsk,
    OpenStream,
    PutSession,
    SendMail,
    Step,
    Stick,
    Trim,
)


def weigh(steps: Sequence[Step]) -> tuple[int, int, bool]:
    """Give how many rows and bytes the steps write, nearly; and whether they forget anything."""
    count = size = 0
    forget = False
    for step in steps:
        count += 1
        if type(step) is Append:
            count += len(step.events)
            for event in step.events:
                size += len(event.payload)
        elif type(step) is OpenStream:
            count += len(step.calls)
            for call in step.calls:
                size += len(call.request)
        elif type(step) is Forward:
            count += len(step.payloads)
            size += sum(map(len, step.payloads))
        elif type(step) is Trim or type(step) is DropStream or type(step) is EndSession:
            forget = True
        else:
            size += _bytes(step)
    return count, size, forget


def _bytes(step: Step) -> int:
    match step:
        case PutSession(record=record):
            return len(record.client_params) + len(record.result)
        case ChangeSession(result=result):
            return len(result or b"")
        case OpenAsk(record=ask):
            return len(ask.request)
        case Stick(request=request):
            return len(request)
        case SendMail(message=message):
            return len(message)
    return 0
