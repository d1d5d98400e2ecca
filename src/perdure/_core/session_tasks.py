"""Tasks of 2025-11-25: calls of a session whose request is answered at once, and whose result is fetched later.

A task is the row of its call, and the answer to its request is an early answer on its stream. It has no state beside
the ledger's: its status follows from the row, its open asks and its final answer.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

from perdure._core.codes import INVALID_PARAMS, METHOD_NOT_FOUND
from perdure._core.durable_calls import (
    INTERRUPTED,
    TaskFacts,
    TaskStatus,
    TaskSupport,
    iso_time,
    kept_for,
    progress_text,
    response_of,
    status_of,
    tools_on,
)
from perdure._core.ids import parse_stream_id
from perdure._core.jsonrpc import JsonObject, mapping, meta_of
from perdure._core.revisions import REVISIONS

GET, RESULT, CANCEL, LIST = "tasks/get", "tasks/result", "tasks/cancel", "tasks/list"
STATUS_CHANGED = "notifications/tasks/status"

RELATED = "io.modelcontextprotocol/related-task"
"""In `_meta` of a task's messages, and of its result: the task."""

IMMEDIATE = "io.modelcontextprotocol/model-immediate-response"
"""In `_meta` of the answer that names a task: what a host may show its model meanwhile."""

OURS = "dev.perdure/tasks"
"""In `_meta` of an `initialize` result whose tasks are Perdure's, not the server's."""

POLL_INTERVAL = 2_000
"""Milliseconds between two polls that a client is asked for. VS Code uses the first value for ever."""

MAX_STATUS = 2_000
"""Characters of a failed result's text that its status repeats: some hosts show their model nothing else."""

NOT_FOUND: tuple[int, str] = (INVALID_PARAMS, "Task not found: it is not one of yours, or it has expired")
OVER: tuple[int, str] = (INVALID_PARAMS, "This task has ended, and cannot be cancelled")
BAD_CURSOR: tuple[int, str] = (INVALID_PARAMS, "The cursor is not one of this list")
NO_LIST: tuple[int, str] = (METHOD_NOT_FOUND, "Tasks are listed only for clients that authenticate")
FORBIDDEN: tuple[int, str] = (METHOD_NOT_FOUND, "This tool does not run as a task: call it without `task`")
REQUIRED: tuple[int, str] = (METHOD_NOT_FOUND, "This tool runs only as a task: call it with `task`")


# --- What is announced


def may_announce(version: object) -> bool:
    """Whether a client that requests a revision may get one with tasks."""
    revision = REVISIONS.get(version) if isinstance(version, str) else None
    return revision is None or revision.tasks


def capability(*, lists: bool) -> JsonObject:
    """The server's capability. `lists`: the client is known, and may see which tasks it has."""
    return {**({"list": {}} if lists else {}), "cancel": {}, "requests": {"tools": {"call": {}}}}


def announce(result: bytes, tasks: JsonObject | None) -> bytes:
    """Add the capability to an `initialize` result. A server with tasks of its own keeps its capability, also through
    another Perdure, whose mark differs."""
    if tasks is None and OURS.encode() not in result:
        return result
    said: JsonObject = json.loads(result)
    meta = {name: value for name, value in meta_of(said).items() if name != OURS}
    said.pop("_meta", None)
    revision, capabilities = REVISIONS.get(str(said.get("protocolVersion"))), mapping(said.get("capabilities"))
    knows = revision is not None and revision.tasks and "tools" in capabilities
    if tasks is not None and knows and "tasks" not in capabilities:
        said["capabilities"], meta[OURS] = {**capabilities, "tasks": tasks}, {}
    if meta:
        said["_meta"] = meta
    return json.dumps(said, separators=(",", ":")).encode()


def announce_again(before: bytes, result: bytes) -> bytes:
    """A later result of the same session, whose client knows the first."""
    return announce(result, json.loads(before)["capabilities"]["tasks"] if is_ours(before) else None)


def as_declared(result: bytes) -> JsonObject:
    """A recorded `initialize` result as the server gave it."""
    said: JsonObject = json.loads(result)
    if is_ours(result):
        said["capabilities"] = {name: value for name, value in said["capabilities"].items() if name != "tasks"}
    return said


@functools.lru_cache(maxsize=256)
def is_ours(result: bytes) -> bool:
    """Whether a session with this `initialize` result has tasks of Perdure's."""
    return OURS.encode() in result and OURS in meta_of(json.loads(result))


# --- Which tools run as tasks


def has_task_tools(rules: Mapping[str, TaskSupport]) -> bool | None:
    """Whether any tool runs as a task, if the operator's rules alone decide that."""
    if any(rule is not TaskSupport.NEVER for rule in rules.values()):
        return True
    return False if "*" in rules else None


def show_support(page: JsonObject, rules: Mapping[str, TaskSupport]) -> JsonObject:
    """A page of `tools/list` with the operator's rules. A tool without a rule stays as it is."""

    def shown(tool: Any) -> Any:
        rule = rules.get(str(tool.get("name")), rules.get("*")) if isinstance(tool, dict) else None
        if rule is None:
            return tool
        support = "forbidden" if rule is TaskSupport.NEVER else rule.value
        return {**tool, "execution": {**mapping(tool.get("execution")), "taskSupport": support}}

    tools = tools_on(page)
    return page if tools is None else {**page, "tools": [shown(tool) for tool in tools]}


def wants_task(params: Mapping[str, Any] | None) -> bool:
    """Whether a request asks to run as a task."""
    return params is not None and isinstance(params.get("task"), dict)


def cursor(opened: float, task: str) -> str:
    """The place of a task in the list of its caller's."""
    return f"{opened.hex()}~{task}"


def read_cursor(given: object) -> tuple[float, str] | None:
    """The place that a cursor names; `None` if it is none."""
    opened, _, task = given.partition("~") if isinstance(given, str) else ("", "", "")
    try:
        place = float.fromhex(opened)
    except (ValueError, OverflowError):
        return None
    return (place, task) if parse_stream_id(task) is not None and math.isfinite(place) else None


# --- What is shown


def related(params: JsonObject | None, task: str) -> JsonObject:
    """The params of a message that a task sends."""
    return {**(params or {}), "_meta": {**meta_of(params), RELATED: {"taskId": task}}}


def is_related(message: Mapping[str, Any], task: str) -> bool:
    """Whether a message is one of a task's."""
    return meta_of(mapping(message.get("params"))).get(RELATED) == {"taskId": task}


def without_related(params: JsonObject) -> JsonObject:
    """The params as the tool gave them."""
    meta = {name: value for name, value in params["_meta"].items() if name != RELATED}
    bare = {name: value for name, value in params.items() if name != "_meta"}
    return {**bare, "_meta": meta} if meta else bare


def task_of(facts: TaskFacts, *, now: float, ttl: float) -> JsonObject:
    """A task as `tasks/get` shows it."""
    response = response_of(facts)
    status, said = status_of(facts, response), ""
    result = response.get("result")
    if status is TaskStatus.COMPLETED and isinstance(result, dict) and result.get("isError") is True:
        status = TaskStatus.FAILED  # the one cell in which the revisions differ
    if status is TaskStatus.FAILED and isinstance(result, dict):
        content = result.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        said = "\n".join(str(block["text"]) for block in blocks if isinstance(block.get("text"), str)) or "failed"
    elif status is TaskStatus.FAILED:
        said = str(response["error"].get("message", "failed"))
    elif facts.is_interrupted:
        said = INTERRUPTED
    elif status is TaskStatus.WORKING and facts.progress is not None:
        said = progress_text(facts.progress)
    return {
        "taskId": facts.id,
        "status": status.value,
        **({"statusMessage": said[:MAX_STATUS]} if said else {}),
        "createdAt": iso_time(facts.created),
        "lastUpdatedAt": iso_time(max(facts.updated, facts.created)),
        "ttl": round(1000 * kept_for(facts, now=now, ttl=ttl)),
        "pollInterval": POLL_INTERVAL,
    }


def created(task: JsonObject, tool: str) -> JsonObject:
    """The answer to a request that begins a task."""
    text = f"{json.dumps(tool[:100], ensure_ascii=False)} has begun, and goes on as a task. Its result comes later."
    return {"task": task, "_meta": {IMMEDIATE: text}}


def result_of(response: JsonObject, task: str) -> JsonObject:
    """The result of a task, as `tasks/result` returns it."""
    return related(response["result"], task)
