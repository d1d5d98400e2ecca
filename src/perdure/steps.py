"""Runs the steps of a tool: each is done once in the life of a call, although its process may die.

The result of a step is in the store before the tool sees it. If the process dies, the call runs again, at any node, and
finished steps return their recorded results. `sessions.tool_steps` keeps them; a tool finds its call in a context
variable, which is empty outside Perdure: there a step is a plain call.

A tool gets the recorded form of a value or an error, also in the first run, so that no run differs from another.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import importlib
import inspect
import threading
import typing
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, TypeVarTuple, Unpack, overload
from weakref import WeakKeyDictionary

import anyio.from_thread
import anyio.to_thread
from pydantic_core import from_json, to_json

from perdure._core.states import ToolStepState, ToolStepStep
from perdure._core.tool_steps import MOST_SLEEP, RESUMABLE_META, StepPlace, ToolStepKind
from perdure.errors import Misuse, StepFailed, StepLimit
from perdure.telemetry import tracing as spans

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESUMABLE: Final = {RESUMABLE_META: True}
"""The `meta` of a tool that goes on after a crash: outside its steps it does nothing that must not be done twice, and
takes the same way each time."""


class NotDone(enum.Enum):
    """What a `check` returns if the step has had no effect yet."""

    NOT_DONE = "not done"


NOT_DONE: Final = NotDone.NOT_DONE


class StepLog(Protocol):
    """Keeps the steps of one call. Its coroutines run in the call's event loop."""

    thread: int | None
    """The thread of a synchronous tool, as of its first step."""

    async def begin(self, kind: ToolStepKind, name: str, *, own: bool, writes: bool, again: bool) -> StepPlace:
        """Begin a step, or find it recorded. `own`: in the tool's own task. `writes`: record that it begins. Raises
        `PerdureError`."""

    async def end(self, place: StepPlace, step: ToolStepStep, value: bytes) -> None:
        """Record the end of a step, and wait until the store has it."""

    def leave(self, place: StepPlace, *, again: bool) -> None:
        """A step was cut short: it stays open."""

    async def sleep(self, seconds: float, name: str, *, own: bool) -> None: ...

    def reserve(self, place: StepPlace, size: int) -> str:
        """Reserve the room for the value of a step. Returns why it is not kept; empty if it is."""

    def key_of(self, place: StepPlace) -> uuid.UUID: ...


call_steps: ContextVar[Callable[[], StepLog] | None] = ContextVar("perdure_call_steps", default=None)
"""Set where a call is handed to its handler; returns the log of the call, which is made for its first step."""

handler_task: ContextVar[asyncio.Task[Any] | None] = ContextVar("perdure_handler_task", default=None)
"""The task in which a handler runs: the tool's own."""


class _Running(NamedTuple):
    """The step that the code runs in."""

    log: StepLog | None
    place: StepPlace | None
    random: uuid.UUID | None


_step: ContextVar[_Running | None] = ContextVar("perdure_step", default=None)


# --- For tools --------------------------------------------------------------------------------------------------------


@overload
async def step(
    name: str,
    fn: Callable[[Unpack[Ts]], Awaitable[T]],
    /,
    *args: *Ts,
    again: bool = ...,
    check: Callable[[], Awaitable[T | NotDone]] | Callable[[], T | NotDone] | None = ...,
) -> T: ...
@overload
async def step(
    name: str,
    fn: Callable[[Unpack[Ts]], T],
    /,
    *args: *Ts,
    again: bool = ...,
    check: Callable[[], Awaitable[T | NotDone]] | Callable[[], T | NotDone] | None = ...,
) -> T: ...
async def step(  # type: ignore[misc]  # mypy does not match `*args: *Ts` with any implementation
    name: str, fn: Callable[..., Any], /, *args: Any, again: bool = False, check: Callable[[], Any] | None = None
) -> Any:
    """Do `fn(*args)` once in the life of the call, and return its result, in this run and in every later one.

    `fn` is async, or it is synchronous and runs in a worker thread. A step that was begun and not finished when its
    process died is not run again, and its call is answered -31001, unless it says otherwise. `again=True`: it may be
    run again. `check`: it is called first; what it returns is the result, and `NOT_DONE` lets `fn` run.

    The value is kept as JSON, and `fn`'s return annotation decides what comes out of it. One that cannot be read at run
    time raises `Misuse`, also where nothing is recorded: a test finds it.
    """
    _check_functions(fn, check, again=again)
    values = _Values.of(fn)
    if (log := _log()) is None:
        return await _plain(fn, args)
    place = await log.begin(ToolStepKind.STEP, name, own=is_own_task(), writes=not again, again=again or bool(check))
    if (recorded := place.recorded) is not None and recorded.state is not ToolStepState.OPEN:
        log.leave(place, again=again)
        return values.recorded(name, recorded.state, recorded.value)
    token = _step.set(_Running(log, place, None))
    cause: Exception | None = None
    try:
        with spans.tool_step(place.label):
            found = await _called(check, ()) if check is not None and recorded is not None else NOT_DONE
            value = await _called(fn, args) if found is NOT_DONE else found
        how, (body, value) = ToolStepStep.END, values.kept(log, place, value)
    except Exception as failure:
        how, body, cause = ToolStepStep.FAIL, _error(log, place, failure), failure
    except BaseException:
        log.leave(place, again=again)
        raise
    finally:
        _step.reset(token)
    await log.end(place, how, body)
    if cause is not None:
        raise _made(name, body) from cause
    return value


def step_sync(
    name: str,
    fn: Callable[[Unpack[Ts]], T],
    /,
    *args: *Ts,
    again: bool = False,
    check: Callable[[], T | NotDone] | None = None,
) -> T:
    """`step` for a synchronous tool: `fn` runs in the tool's own thread."""
    _check_functions(fn, check, again=again)
    if _is_async(fn) or _is_async(check):
        raise Misuse("step_sync takes synchronous functions; use `await perdure.step` in an async tool")
    values = _Values.of(fn)
    if (open_log := _open_log()) is None or (task := handler_task.get()) is None:
        token = _step.set(_step.get() or _Running(None, None, uuid.uuid4()))
        try:
            return fn(*args)
        finally:
            _step.reset(token)
    loop = task.get_loop()
    log, place = _in_loop(loop, _begin_in_thread(open_log, name, _worker_thread(), again=again, check=bool(check)))
    if (recorded := place.recorded) is not None and recorded.state is not ToolStepState.OPEN:
        loop.call_soon_threadsafe(functools.partial(log.leave, place, again=again))
        return typing.cast("T", values.recorded(name, recorded.state, recorded.value))
    token = _step.set(_Running(log, place, None))
    cause: Exception | None = None
    try:
        with spans.tool_step(place.label):
            found = check() if check is not None and recorded is not None else NOT_DONE
            value = fn(*args) if found is NOT_DONE else found
        how, (body, value) = ToolStepStep.END, values.kept(log, place, value)
    except Exception as failure:
        how, body, cause = ToolStepStep.FAIL, _error(log, place, failure), failure
    except BaseException:
        loop.call_soon_threadsafe(functools.partial(log.leave, place, again=again))
        raise
    finally:
        _step.reset(token)
    _in_loop(loop, log.end(place, how, body))
    if cause is not None:
        raise _made(name, body) from cause
    return value


async def sleep(seconds: float, *, name: str = "sleep") -> None:
    """Sleep until a time that is recorded: a call that runs again sleeps the rest."""
    if not (isinstance(seconds, int | float) and 0 <= seconds <= MOST_SLEEP):
        raise Misuse(f"a tool sleeps for 0 to {MOST_SLEEP:,} seconds, not for {seconds!r:.50}")
    if (log := _log()) is None:
        await asyncio.sleep(seconds)
    else:
        await log.sleep(seconds, name, own=is_own_task())


def step_key() -> uuid.UUID:
    """Return the key of the step that the code runs in, the same in every run: for APIs that take an idempotency
    key. Outside Perdure it is random."""
    running = _step.get()
    if running is None:
        if call_steps.get() is not None:
            raise Misuse("step_key() was called outside a step; call it in the function that a step runs")
        return uuid.uuid4()
    if running.log is None or running.place is None:
        return running.random or uuid.uuid4()
    return running.log.key_of(running.place)


# --- Where the code runs ----------------------------------------------------------------------------------------------


def _open_log() -> Callable[[], StepLog] | None:
    """What opens the log of the call, unless there is none or the code runs in a step: then this is part of that
    one."""
    return None if is_in_step() else call_steps.get()


def _log() -> StepLog | None:
    if (open_log := _open_log()) is None:
        return None
    if (task := handler_task.get()) is not None and task.get_loop() is not asyncio.get_running_loop():
        raise Misuse("a step was begun in another event loop than that of its call; make the tool itself async")
    return open_log()


def is_own_task() -> bool:
    """Whether the code runs in the tool's own task."""
    task = handler_task.get()
    return task is not None and task is asyncio.current_task()


def _worker_thread() -> int | None:
    """The number of this thread, if it is one in which the SDK runs synchronous tools; `None` for any other."""
    try:
        anyio.from_thread.check_cancelled()
    except RuntimeError:
        return None
    return threading.get_ident()


async def _begin_in_thread(
    open_log: Callable[[], StepLog], name: str, thread: int | None, *, again: bool, check: bool
) -> tuple[StepLog, StepPlace]:
    """Begin a step of a synchronous tool. Its own thread is the first in which it does a step while the tool's own task
    waits for a thread: `gather` may begin threads in any order."""
    log = open_log()
    if log.thread is None and _waits_for_thread(handler_task.get()):
        log.thread = thread
    own = thread is not None and log.thread == thread
    return log, await log.begin(ToolStepKind.STEP, name, own=own, writes=not again, again=again or check)


def _waits_for_thread(task: asyncio.Task[Any] | None) -> bool:
    """Whether a task itself waits for a function in a worker thread, and not for another task."""
    waits: Any = None if task is None else task.get_coro()
    while inspect.iscoroutine(waits) or inspect.isgenerator(waits):
        if inspect.iscoroutine(waits) and waits.cr_code is anyio.to_thread.run_sync.__code__:
            return True
        waits = waits.cr_await if inspect.iscoroutine(waits) else waits.gi_yieldfrom
    return False


def is_in_step() -> bool:
    """Whether the code runs in a step: what it does is part of that one."""
    return _step.get() is not None


def _in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Do something in the call's event loop, from a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    work.close()
    raise Misuse("step_sync would block the event loop; use `await perdure.step` in an async tool")


async def _plain(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    token = _step.set(_step.get() or _Running(None, None, uuid.uuid4()))
    try:
        return await _called(fn, args)
    finally:
        _step.reset(token)


async def _called(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if _is_async(fn):
        return await fn(*args)
    value = await anyio.to_thread.run_sync(fn, *args)
    return await value if inspect.isawaitable(value) else value


def _is_async(fn: object) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _check_functions(fn: object, check: object, *, again: bool) -> None:
    """Refuse what would fail the step, or would be found out only after a crash."""
    if again and check is not None:
        raise Misuse("a step has `again=True` or `check=`: one that is checked runs again only if it was not done")
    for given in (fn,) if check is None else (fn, check):
        if not callable(given):
            raise Misuse(f"a step takes a function, not {given!r:.50}; its arguments follow it")


# --- Values and errors ------------------------------------------------------------------------------------------------


class _Values:
    """Writes and reads the values of one function's steps, as its return annotation says."""

    __slots__ = ("_adapter",)

    def __init__(self, adapter: TypeAdapter[Any] | None) -> None:
        self._adapter = adapter

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> _Values:
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = getattr(fn, "__func__", fn)
        try:
            known = _known.get(fn)
        except TypeError:  # no weak reference to it is possible
            return cls._for(fn)
        if known is None:
            known = _known[fn] = cls._for(fn)
        return known

    @classmethod
    def _for(cls, fn: Callable[..., Any]) -> _Values:
        if inspect.isclass(fn):
            return cls(_adapter(fn, fn))
        hinted = fn if inspect.isroutine(fn) else type(fn).__call__
        if "return" not in getattr(hinted, "__annotations__", {}):
            return _PLAIN
        # Not all hints: the types of arguments may be imported under `TYPE_CHECKING`.
        alone = SimpleNamespace(
            __annotations__={"return": hinted.__annotations__["return"]},
            __globals__=getattr(inspect.unwrap(hinted), "__globals__", {}),
            __type_params__=getattr(hinted, "__type_params__", ()),
        )
        try:
            annotation = typing.get_type_hints(alone, include_extras=True)["return"]
        except Exception as failure:
            raise Misuse(
                f"the return annotation of {_name(fn)} cannot be read: {failure!r}; import its names at run time"
            ) from failure
        return _PLAIN if annotation is Any else cls(_adapter(fn, annotation))

    def kept(self, log: StepLog, place: StepPlace, value: object) -> tuple[bytes, Any]:
        """The recorded form of a value, and what the tool gets of it."""
        try:
            if self._adapter is not None:
                value = self._adapter.dump_python(value, mode="json", by_alias=True, round_trip=True, warnings=False)
            body = to_json(value, inf_nan_mode="constants")
            value = self._read(body)
        except ValueError as failure:
            sentence = f"its value cannot be kept as JSON: {failure}"
            raise StepFailed(place.name, type(failure).__name__, sentence) from failure
        if sentence := log.reserve(place, len(body)):
            raise StepLimit(sentence)
        return body, value

    def recorded(self, name: str, state: ToolStepState, body: bytes) -> Any:
        """Return a recorded value, or raise a recorded error."""
        if state is ToolStepState.FAILED:
            raise _made(name, body)
        try:
            return self._read(body)
        except ValueError as failure:
            raise StepFailed(name, type(failure).__name__, f"its recorded value cannot be read: {failure}") from failure

    def _read(self, body: bytes) -> Any:
        return from_json(body) if self._adapter is None else self._adapter.validate_json(body)


_PLAIN = _Values(None)
_known: WeakKeyDictionary[Callable[..., Any], _Values] = WeakKeyDictionary()


def _adapter(fn: Callable[..., Any], annotation: Any) -> TypeAdapter[Any]:
    # Not at the top: a gateway has no steps, and its start does not wait for this import.
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    try:
        adapter = TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True)  # it is made also where the type of a field cannot be read
    except (PydanticUserError, PydanticUndefinedAnnotation) as failure:
        sentence = f"{_name(fn)} returns {annotation!r}, which cannot be kept as JSON: {failure.message}"
        raise Misuse(sentence) from failure
    return adapter


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


def _made(name: str, body: bytes) -> Exception:
    """The error of a step, out of its recorded form."""
    error = from_json(body)
    return _rebuilt(error) or StepFailed(name, error["kind"], error["message"])


def _error(log: StepLog, place: StepPlace, failure: Exception) -> bytes:
    """The recorded form of an error: its class and arguments, if it can be made again of them."""
    kind, text = type(failure), _text(failure)
    message = text[:_MOST_MESSAGE].encode(errors="backslashreplace").decode()  # a file's name may be no UTF-8
    error: dict[str, Any] = {"kind": kind.__name__, "message": message}
    try:
        whole = {**error, "class": [kind.__module__, kind.__qualname__], "args": list(failure.args)}
        body = to_json(whole)
        again = _rebuilt(from_json(body))
        is_same = again is not None and again.args == failure.args and _text(again) == text
        if is_same and not log.reserve(place, len(body)):
            return body
    except Exception:  # its arguments are no JSON, or cannot be compared
        pass
    return to_json(error)


def _text(failure: Exception) -> str:
    try:
        return str(failure)
    except Exception:  # whatever its class raises
        return ""


_MOST_MESSAGE = 10_000
"""Characters of an error that cannot be made again: enough for a model and for a log."""


def _rebuilt(error: dict[str, Any]) -> Exception | None:
    """Make an error again; `None` if its class is not there, or does not take these arguments."""
    if "class" not in error:
        return None
    module, qualname = error["class"]
    try:
        kind: Any = importlib.import_module(module)
        for part in qualname.split("."):
            kind = getattr(kind, part)
        return kind(*error["args"]) if issubclass(kind, Exception) else None
    except Exception:  # whatever the class raises
        return None
