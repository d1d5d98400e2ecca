"""Weighs steps before they are written: how many rows and bytes they are."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store import base


def weigh(steps: Sequence[base.Step]) -> tuple[int, int, bool]:
    """Give how many rows and bytes the steps write, nearly; and whether they forget anything."""
    count = size = 0
    forget = False
    for step in steps:
        count += 1
        if type(step) is base.Append:
            count += len(step.events)
            for event in step.events:
                size += len(event.payload)
        elif type(step) is base.OpenStream:
            count += len(step.calls)
            for call in step.calls:
                size += len(call.request)
        elif type(step) is base.Forward:
            count += len(step.payloads)
            size += sum(map(len, step.payloads))
        elif type(step) is base.Trim or type(step) is base.DropStream or type(step) is base.EndSession:
            forget = True
        else:
            size += _bytes(step)
    return count, size, forget


def _bytes(step: base.Step) -> int:
    match step:
        case base.PutSession(record=record):
            return len(record.client_params) + len(record.result)
        case base.ChangeSession(result=result):
            return len(result or b"")
        case base.OpenAsk(record=ask):
            return len(ask.request)
        case base.Stick(request=request):
            return len(request)
        case base.SendMail(message=message):
            return len(message)
    return 0
