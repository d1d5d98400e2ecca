"""A JSON-RPC message as its text, and the few messages that a client makes itself."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core import splice

#: The escape of half a character; two of them are a whole one.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message: its text as it came, and its decoded body (`splice.decode`, without halves of characters)."""

    text: str
    body: Mapping[str, Any]
    part: tuple[int, int] | None = None
    """Where the result or the error of an answer begins and ends in the text, if that is known."""

    @property
    def method(self) -> str | None:
        found = self.body.get("method")
        return found if isinstance(found, str) else None

    @property
    def params(self) -> Mapping[str, Any]:
        found = self.body.get("params")
        return found if isinstance(found, dict) else {}

    @property
    def is_request(self) -> bool:
        return self.method is not None and "id" in self.body

    @property
    def is_answer(self) -> bool:
        return self.method is None and ("result" in self.body or isinstance(self.body.get("error"), dict))

    @property
    def is_error(self) -> bool:
        return self.body.get("error") is not None

    @property
    def result(self) -> dict[str, Any]:
        found = self.body.get("result")
        return found if isinstance(found, dict) else {}

    @property
    def payload(self) -> str:
        """The own text of an answer's result, or of its error."""
        if self.part is None:
            return splice.cut(self.text, "error" if self.is_error else "result") or "{}"
        return self.text[self.part[0] : self.part[1]]

    @property
    def why(self) -> str:
        """The sentence of an error."""
        error = self.body.get("error")
        found = error.get("message") if isinstance(error, dict) else None
        return found if isinstance(found, str) else "no reason given"

    def with_token(self, token: str) -> "Message":
        """A progress notification under the token that the request's sender knows, given as JSON."""
        return Message(text=splice.replaced(self.text, token, "params", "progressToken"), body=self.body)

    def answering(self, request_id: str) -> str:
        """The answer under the id that its request had, given as JSON."""
        if "id" in self.body:
            return splice.replaced(self.text, request_id, "id")
        return f'{{"jsonrpc":"2.0","id":{request_id},"error":{splice.cut(self.text, "error") or "{}"}}}'


def messages_in(text: str) -> list[Message]:
    """The messages in a server's text; 2025-03-26 allows several in an array. Raises `ValueError`."""
    text = splice.one_line(text).strip(" ")
    if (answer := splice.answer(text)) is not None:
        return [Message(text=text, body=answer[0], part=answer[1:])]
    found = splice.decode(text)
    if _HALF.search(text) is not None:
        found = splice.without_halves(found)
    if isinstance(found, dict):
        return [Message(text=text, body=found)]
    if not isinstance(found, list) or not all(isinstance(body, dict) for body in found):
        raise ValueError("a message must be an object")
    return [Message(text=one, body=body) for one, body in zip(splice.items(text), found, strict=True)]


encode = json.JSONEncoder(separators=(",", ":")).encode
"""(`json.dumps` would make another encoder for each message.)"""


def error(request_id: str, code: int, message: str, data: Mapping[str, Any] | None = None) -> Message:
    """An error response of our own; the id is given as JSON."""
    told = {"code": code, "message": message, **({} if data is None else {"data": data})}
    text = f'{{"jsonrpc":"2.0","id":{request_id},"error":{encode(told)}}}'
    return Message(text=text, body={"jsonrpc": "2.0", "id": splice.decode(request_id), "error": told})


def message_of(**members: Any) -> Message:
    return messages_in(encode({"jsonrpc": "2.0", **members}))[0]
