"""The four model APIs that hosts speak, each with the little that a scripted model needs of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool that the host offers to the model."""

    name: str
    namespace: str = ""


@dataclass(frozen=True)
class Turn:
    """What a request shows the model."""

    tools: tuple[Tool, ...]
    results: Mapping[str, str]
    """What tools answered, by the id of the call."""
    held: frozenset[str] = frozenset()
    """The calls whose result the host still waits for, while its model goes on."""


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Call:
    id: str
    tool: Tool
    arguments: Json


class ModelApi(Protocol):
    """One model API."""

    def serves(self, path: str) -> bool: ...
    def read(self, body: Json) -> Turn: ...
    def events(self, answer: Say | Call) -> Iterator[Json]:
        """The answer as a stream of events."""
        ...

    def whole(self, answer: Say | Call) -> Json:
        """The answer in one piece."""
        ...


def text_of(content: Any) -> str:
    """All strings in what a host shows of a result, whatever it wraps them in."""
    match content:
        case str():
            return content
        case dict():
            return text_of(list(content.values()))
        case list():
            return " ".join(filter(None, map(text_of, content)))
        case _:
            return ""


def sse(events: Iterable[Json]) -> str:
    """Events as bytes of a stream; those with a type carry it as their name, too."""
    return "".join(
        (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n" for event in events
    )


class Messages:
    """Anthropic's Messages."""

    def serves(self, path: str) -> bool:
        return path.endswith("/messages")

    def read(self, body: Json) -> Turn:
        results: dict[str, str] = {}
        last = ""
        for message in body["messages"]:
            parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
            for part in parts:
                if part.get("type") == "tool_result":
                    last = part["tool_use_id"]
                    results[last] = text_of(part.get("content", ""))
                elif last and "<task-notification>" in part.get("text", ""):
                    results[last] = part["text"].partition("<task-notification>")[2]
        held = frozenset(call for call, text in results.items() if "moved to the background as task" in text)
        shown = {call: text for call, text in results.items() if call not in held}
        return Turn(tuple(Tool(tool["name"]) for tool in body.get("tools", [])), shown, held)

    def events(self, answer: Say | Call) -> Iterator[Json]:
        whole = self.whole(answer)
        [block] = whole["content"]
        yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
        if isinstance(answer, Say):
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": answer.text}
        else:
            partial = json.dumps(answer.arguments)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": partial}
        yield {"type": "content_block_start", "index": 0, "content_block": empty}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}
        yield {"type": "message_stop"}

    def whole(self, answer: Say | Call) -> Json:
        block: Json
        if isinstance(answer, Say):
            block, reason = {"type": "text", "text": answer.text}, "end_turn"
        else:
            block = {"type": "tool_use", "id": answer.id, "name": answer.tool.name, "input": answer.arguments}
            reason = "tool_use"
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-4-5",
            "content": [block],
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }


class Responses:
    """OpenAI's Responses."""

    def serves(self, path: str) -> bool:
        return path.endswith("/responses")

    def read(self, body: Json) -> Turn:
        tools = []
        for tool in body.get("tools", []):
            if tool["type"] == "namespace":
                tools += [Tool(inner["name"], tool["name"]) for inner in tool["tools"]]
            elif tool["type"] == "function":
                tools.append(Tool(tool["name"]))
        items = [] if isinstance(body["input"], str) else body["input"]
        outputs = [item for item in items if item.get("type") == "function_call_output"]
        return Turn(tuple(tools), {item["call_id"]: text_of(item["output"]) for item in outputs})

    def events(self, answer: Say | Call) -> Iterator[Json]:
        whole = self.whole(answer)
        [item] = whole["output"]
        steps: list[Json] = [
            {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]
        for number, step in enumerate(steps):
            yield {**step, "sequence_number": number}

    def whole(self, answer: Say | Call) -> Json:
        item: Json
        if isinstance(answer, Say):
            text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        else:
            item = {
                "id": f"fc_{answer.id}",
                "type": "function_call",
                "status": "completed",
                "call_id": answer.id,
                "name": answer.tool.name,
                "arguments": json.dumps(answer.arguments),
            }
            if answer.tool.namespace:
                item["namespace"] = answer.tool.namespace
        usage = {
            "input_tokens": 1,
            "output_tokens": 1,
            "total_tokens": 2,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": "gpt-5",
            "status": "completed",
            "output": [item],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


class ChatCompletions:
    """OpenAI's Chat Completions, and all that took over their form."""

    def serves(self, path: str) -> bool:
        return path.endswith("/chat/completions")

    def read(self, body: Json) -> Turn:
        results = {m["tool_call_id"]: text_of(m["content"]) for m in body["messages"] if m["role"] == "tool"}
        return Turn(tuple(Tool(tool["function"]["name"]) for tool in body.get("tools") or []), results)

    def events(self, answer: Say | Call) -> Iterator[Json]:
        whole = self.whole(answer)
        [choice] = whole["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
        chunk = {**whole, "object": "chat.completion.chunk"}
        del chunk["usage"]
        yield {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
        yield {**chunk, "choices": [], "usage": whole["usage"]}

    def whole(self, answer: Say | Call) -> Json:
        message: Json
        if isinstance(answer, Say):
            message, reason = {"role": "assistant", "content": answer.text}, "stop"
        else:
            function = {"name": answer.tool.name, "arguments": json.dumps(answer.arguments)}
            call = {"id": answer.id, "type": "function", "function": function}
            message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "gpt-5",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }


class GenerateContent:
    """Gemini's `generateContent`."""

    def serves(self, path: str) -> bool:
        return path.endswith(("enerateContent",))

    def read(self, body: Json) -> Turn:
        declared = [each for tool in body.get("tools") or [] for each in tool.get("functionDeclarations") or []]
        parts = [part for content in body["contents"] for part in content.get("parts") or []]
        responses = [part["functionResponse"] for part in parts if "functionResponse" in part]
        # A host may leave the id out: then it is the number of the call.
        results = {each.get("id") or call_id(n): text_of(each["response"]) for n, each in enumerate(responses, start=1)}
        return Turn(tuple(Tool(each["name"]) for each in declared), results)

    def events(self, answer: Say | Call) -> Iterator[Json]:
        yield self.whole(answer)

    def whole(self, answer: Say | Call) -> Json:
        part: Json
        if isinstance(answer, Say):
            part = {"text": answer.text}
        else:
            part = {"functionCall": {"id": answer.id, "name": answer.tool.name, "args": answer.arguments}}
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-2.5-pro"}


def call_id(number: int) -> str:
    return f"call_{number}"


APIS: tuple[ModelApi, ...] = (Messages(), Responses(), ChatCompletions(), GenerateContent())
