"""A server with one of everything that MCP offers.

    perdure serve examples/everything.py:server

The official conformance suite requires these names and texts, so the same file is a tour for readers and the server
under test in `tests/conformance`. It is an ordinary `MCPServer`: nothing in it calls Perdure.
"""

import base64
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import (
    AssistantMessage,
    Audio,
    Context,
    Elicit,
    ElicitationResult,
    Image,
    ListRoots,
    MCPServer,
    Message,
    Resolve,
    Sample,
    UserMessage,
)
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field

# One red pixel, and eight samples of silence at 8 kHz.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC")
WAV = base64.b64decode("UklGRiwAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQgAAACAgICAgICAgA==")

STEP_SECONDS = 0.05  # between two messages of a tool, so that a client sees them come one by one


# --- A tool whose JSON schema is written by hand ---------------------------------------------------------------------

ADDRESS_BOOK_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def add_contact(
    name: str = "",
    address: dict[str, str] | None = None,
    contact_method: Annotated[Literal["phone", "email"], Field(alias="contactMethod")] = "email",
    phone: str | None = None,
    email: str | None = None,
) -> str:
    reached_by = phone if contact_method == "phone" else email
    if reached_by is None:
        raise ToolError(f"contactMethod is {contact_method}, but no {contact_method} was given")
    return json.dumps({"name": name, "address": address, contact_method: reached_by})


def with_schema(tool: Tool, schema: dict[str, Any]) -> Tool:
    """The same tool, listed with a richer schema than its signature can express."""
    return tool.model_copy(update={"parameters": schema})


TaskSupport = Literal["forbidden", "optional", "required"]

# What these tools say of themselves; all others leave it open.
TASK_SUPPORT: dict[str, TaskSupport] = {
    "greet": "forbidden",
    "failing_job": "required",
    "protocol_error_job": "required",
    "test_tool_with_task": "required",
}


class EverythingServer(MCPServer):
    """Lists with each tool whether it runs as a task, for which `MCPServer.tool()` has no parameter."""

    async def list_tools(self) -> list[types.Tool]:
        return [
            tool.model_copy(update={"execution": types.ToolExecution(task_support=TASK_SUPPORT.get(tool.name))})
            if tool.name in TASK_SUPPORT
            else tool
            for tool in await super().list_tools()
        ]


server = EverythingServer(
    "everything",
    title="Everything server",
    version="1.0.0",
    instructions="Every tool does what its name says; none of them keeps or changes anything of yours.",
    tools=[
        with_schema(
            Tool.from_function(
                add_contact,
                name="json_schema_2020_12_tool",
                description="Checks a contact against a JSON Schema 2020-12",
            ),
            ADDRESS_BOOK_SCHEMA,
        )
    ],
)


# --- Tools: what an answer can hold ----------------------------------------------------------------------------------


@server.tool()
async def test_simple_text() -> str:
    """Answers with text"""
    return "This is a simple text response for testing."


@server.tool(structured_output=False)
async def test_image_content() -> Image:
    """Answers with an image"""
    return Image(data=PNG, format="png")


@server.tool(structured_output=False)
async def test_audio_content() -> Audio:
    """Answers with a sound"""
    return Audio(data=WAV, format="wav")


@server.tool(structured_output=False)
async def test_embedded_resource() -> types.EmbeddedResource:
    """Answers with a resource and its content"""
    return embedded("test://embedded-resource", "This is an embedded resource content.")


@server.tool(structured_output=False)
async def test_multiple_content_types() -> list[str | Image | types.EmbeddedResource]:
    """Answers with text, an image and a resource at once"""
    data = json.dumps({"test": "data", "value": 123})
    return [
        "Multiple content types test:",
        Image(data=PNG, format="png"),
        embedded("test://mixed-content-resource", data, mime_type="application/json"),
    ]


@server.tool()
async def test_error_handling() -> str:
    """Fails, and tells the model why"""
    raise ToolError("This tool intentionally returns an error for testing")


@server.tool()
async def test_header_parameter(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Takes an argument that clients of 2026-07-28 repeat in the header Mcp-Param-Region, for routers on the way"""
    return f"Routed to {region}"


def embedded(uri: str, text: str, mime_type: str = "text/plain") -> types.EmbeddedResource:
    contents = types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)
    return types.EmbeddedResource(type="resource", resource=contents)


# --- Tools: messages on the way to the answer ------------------------------------------------------------------------


@server.tool()
async def test_tool_with_progress(ctx: Context) -> str:
    """Reports progress, if the caller asked for it"""
    for percent in (0, 50, 100):
        await ctx.report_progress(percent, 100, f"Completed step {percent} of 100")
        await anyio.sleep(STEP_SECONDS)
    return "Progress reported"


@server.tool()
async def test_tool_with_logging(ctx: Context) -> str:
    """Sends log messages while it works"""
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await log_info(ctx, line)
        await anyio.sleep(STEP_SECONDS)
    return "Tool with logging executed successfully"


@server.tool()
async def test_logging_tool(ctx: Context) -> str:
    """Sends one log message; at 2026-07-28 only to callers that ask for log messages in their request"""
    await log_info(ctx, "One line from the logging tool")
    return "Logged one line"


@server.tool()
async def test_reconnection(ctx: Context) -> str:
    """Closes its connection in the middle of the call; the client comes back with Last-Event-ID and gets the answer"""
    await anyio.sleep(STEP_SECONDS)  # the SDK's own server forgets the first event id when a tool hangs up at once
    await ctx.close_sse_stream()
    await anyio.sleep(STEP_SECONDS)
    return "Reconnection test completed successfully. If you received this, the client properly reconnected."


# --- Tools that ask the client ---------------------------------------------------------------------------------------
#
# A parameter with `Resolve(...)` is not an argument of the call: the function named there asks the client a question,
# and the tool receives the answer. In a session the question is a request of its own on the call's stream. At
# 2026-07-28 it is the call's first result, and the client calls again with the answer. The tool is the same.


class Person(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class Profile(BaseModel):
    """Every primitive type, each with a default (SEP-1034)."""

    name: str = Field(default="John Doe", description="User name")
    age: int = Field(default=30, description="User age")
    score: float = Field(default=95.5, description="User score")
    status: Literal["active", "inactive", "pending"] = Field(default="active", description="User status")
    verified: bool = Field(default=True, description="Verification status")


Option = Literal["option1", "option2", "option3"]
TITLED: list[Any] = [
    {"const": "value1", "title": "First Option"},
    {"const": "value2", "title": "Second Option"},
    {"const": "value3", "title": "Third Option"},
]


class Choices(BaseModel):
    """One choice or several, with or without a title for each value (SEP-1330)."""

    untitled_single: Option = Field(alias="untitledSingle")
    titled_single: str = Field(alias="titledSingle", json_schema_extra={"oneOf": TITLED})
    legacy_enum: Literal["opt1", "opt2", "opt3"] = Field(
        alias="legacyEnum", json_schema_extra={"enumNames": ["Option One", "Option Two", "Option Three"]}
    )
    untitled_multi: list[Option] = Field(alias="untitledMulti")
    titled_multi: list[str] = Field(alias="titledMulti", json_schema_extra={"items": {"anyOf": TITLED}})


class Name(BaseModel):
    name: str


class Color(BaseModel):
    color: str


class Confirmation(BaseModel):
    ok: bool


async def ask_model(prompt: str) -> Sample:
    return Sample([types.SamplingMessage(role="user", content=text(prompt))], max_tokens=100)


async def ask_person(message: str) -> Elicit[Person]:
    return Elicit(message, Person)


async def ask_profile() -> Elicit[Profile]:
    return Elicit("Please review and update the form fields with defaults", Profile)


async def ask_choices() -> Elicit[Choices]:
    return Elicit("Please select options from the enum fields", Choices)


async def ask_capital() -> Sample:
    return await ask_model("What is the capital of France?")


async def ask_greeting() -> Sample:
    return await ask_model("Generate a greeting")


async def ask_roots() -> ListRoots:
    return ListRoots()


async def ask_name() -> Elicit[Name]:
    return Elicit("What is your name?", Name)


async def ask_color(name: Annotated[Name, Resolve(ask_name)]) -> Elicit[Color]:
    return Elicit(f"{name.name}, what is your favorite color?", Color)


async def ask_confirmation() -> Elicit[Confirmation]:
    return Elicit("Please confirm", Confirmation)


def text(value: str) -> types.TextContent:
    return types.TextContent(type="text", text=value)


def told(outcome: ElicitationResult[Any]) -> str:
    content = outcome.data.model_dump_json(by_alias=True) if outcome.action == "accept" else "none"
    return f"action={outcome.action}, content={content}"


def spoken(result: types.CreateMessageResult) -> str:
    return result.content.text if isinstance(result.content, types.TextContent) else f"({result.content.type})"


@server.tool()
async def test_sampling(prompt: str, answer: Annotated[types.CreateMessageResult, Resolve(ask_model)]) -> str:
    """Asks the client's model"""
    return f"LLM response: {spoken(answer)}"


@server.tool()
async def test_elicitation(message: str, person: Annotated[ElicitationResult[Person], Resolve(ask_person)]) -> str:
    """Asks the user"""
    return f"User response: {told(person)}"


@server.tool()
async def test_elicitation_sep1034_defaults(
    profile: Annotated[ElicitationResult[Profile], Resolve(ask_profile)],
) -> str:
    """Asks the user with a form that is already filled in"""
    return f"Elicitation completed: {told(profile)}"


@server.tool()
async def test_elicitation_sep1330_enums(choices: Annotated[ElicitationResult[Choices], Resolve(ask_choices)]) -> str:
    """Asks the user to choose"""
    return f"Elicitation completed: {told(choices)}"


@server.tool()
async def test_missing_capability(answer: Annotated[types.CreateMessageResult, Resolve(ask_capital)]) -> str:
    """Cannot work without sampling: a client that does not offer it gets the error -32021"""
    return spoken(answer)


@server.tool()
async def test_streaming_elicitation(name: Annotated[Name, Resolve(ask_name)]) -> str:
    """Asks the user; at 2026-07-28 never by a request on the response's stream"""
    return f"Hello, {name.name}!"


@server.tool()
async def test_input_required_result_sampling(
    answer: Annotated[types.CreateMessageResult, Resolve(ask_capital)],
) -> str:
    """One question, to the model"""
    return spoken(answer)


@server.tool()
async def test_input_required_result_list_roots(roots: Annotated[types.ListRootsResult, Resolve(ask_roots)]) -> str:
    """One question, for the client's roots"""
    return f"Roots: {', '.join(str(root.uri) for root in roots.roots)}"


@server.tool()
async def test_input_required_result_multiple_inputs(
    name: Annotated[Name, Resolve(ask_name)],
    greeting: Annotated[types.CreateMessageResult, Resolve(ask_greeting)],
    roots: Annotated[types.ListRootsResult, Resolve(ask_roots)],
) -> str:
    """Three questions at once"""
    return f"{spoken(greeting)} {name.name}, you have {len(roots.roots)} roots"


@server.tool()
async def test_input_required_result_multi_round(
    name: Annotated[Name, Resolve(ask_name)], color: Annotated[Color, Resolve(ask_color)]
) -> str:
    """Two questions, the second made from the first one's answer"""
    return f"{name.name} likes {color.color}"


@server.tool()
async def test_input_required_result_tampered_state(
    confirmation: Annotated[Confirmation, Resolve(ask_confirmation)],
) -> str:
    """Refuses a state that is not the one it gave out"""
    return "Confirmed" if confirmation.ok else "Not confirmed"


# --- The same at 2026-07-28 by hand, with names and a state of our own -----------------------------------------------


def form(message: str, schema: type[BaseModel]) -> types.ElicitRequest:
    params = types.ElicitRequestFormParams(message=message, requested_schema=schema.model_json_schema())
    return types.ElicitRequest(params=params)


def filled_in(ctx: Context, key: str) -> dict[str, Any] | None:
    """What the user entered in that form; None until then."""
    answer = (ctx.input_responses or {}).get(key)
    return answer.content if isinstance(answer, types.ElicitResult) and answer.action == "accept" else None


@server.tool(structured_output=False)
async def test_input_required_result_elicitation(ctx: Context) -> str | types.InputRequiredResult:
    """One question, to the user"""
    if (answer := filled_in(ctx, "user_name")) is None:
        return types.InputRequiredResult(input_requests={"user_name": form("What is your name?", Name)})
    return f"Hello, {answer.get('name')}!"


@server.tool(structured_output=False)
async def test_input_required_result_request_state(ctx: Context) -> str | types.InputRequiredResult:
    """One question, with a state that the client brings back (the SDK seals it, so it cannot be forged)"""
    if filled_in(ctx, "confirm") is None or ctx.request_state != "asked once":
        return types.InputRequiredResult(
            input_requests={"confirm": form("Please confirm", Confirmation)}, request_state="asked once"
        )
    return "state-ok"


@server.tool(structured_output=False)
async def test_input_required_result_capabilities(ctx: Context) -> str | types.InputRequiredResult:
    """Asks only what this client can answer"""
    able = ctx.client_capabilities or types.ClientCapabilities()
    questions: dict[str, types.InputRequest] = {}
    if able.elicitation is not None:
        questions["user_name"] = form("What is your name?", Name)
    if able.sampling is not None:
        questions["greeting"] = types.CreateMessageRequest(params=(await ask_greeting()).params)
    if ctx.input_responses or not questions:
        return f"Received: {', '.join(ctx.input_responses or ()) or 'nothing'}"
    return types.InputRequiredResult(input_requests=questions)


# --- Tools for tasks -------------------------------------------------------------------------------------------------
#
# At 2026-07-28 a call that takes long becomes a task, if its client declares tasks: the client gets a handle and asks
# for the outcome later. The tools do nothing for it. What they ask with `ctx.elicit` while they run, a task shows as
# `inputRequests`.

JOB_SECONDS = 1.0  # long enough for a handle to go out before the job ends


class Approval(BaseModel):
    confirm: bool


@server.tool()
async def greet(name: str) -> str:
    """Answers at once and is never a task"""
    return f"Hello, {name}!"


@server.tool()
async def slow_compute(seconds: float, ctx: Context, label: str = "result") -> str:
    """Takes as many seconds as it is told, and reports progress"""
    begun = anyio.current_time()
    while (left := begun + seconds - anyio.current_time()) > 0:
        await ctx.report_progress(seconds - left, seconds, f"computing {label}")
        await anyio.sleep(min(left, JOB_SECONDS))
    return f"{label}: computed for {seconds:g} seconds"


@server.tool()
async def failing_job() -> str:
    """Works for a second, then fails and tells the model why"""
    await anyio.sleep(JOB_SECONDS)
    raise ToolError("The job failed after its work, as it always does")


@server.tool()
async def protocol_error_job() -> str:
    """Works for a second, then ends with a JSON-RPC error in place of a result"""
    await anyio.sleep(JOB_SECONDS)
    raise MCPError(code=types.INTERNAL_ERROR, message="The job broke down")


@server.tool()
async def confirm_delete(filename: str, ctx: Context) -> str:
    """Asks the user before it would delete a file (it deletes nothing)"""
    answer = await ctx.elicit(f"Delete {filename}?", Approval)
    agreed = answer.action == "accept" and answer.data.confirm
    return f"{filename} would be deleted now" if agreed else f"{filename} stays"


@server.tool()
async def multi_input(ctx: Context) -> str:
    """Asks the user two things at once"""
    answers: dict[str, str] = {}

    async def ask(what: str, schema: type[BaseModel]) -> None:
        answers[what] = told(await ctx.elicit(f"Please enter: {what}", schema))

    async with anyio.create_task_group() as questions:
        questions.start_soon(ask, "name", Name)
        questions.start_soon(ask, "approval", Approval)
    return "; ".join(f"{what}: {answers[what]}" for what in sorted(answers))


@server.tool(structured_output=False)
async def test_tool_with_task(ctx: Context) -> str | types.InputRequiredResult:
    """Asks the user by its first result; called again with the answer, it works for a second"""
    if (answer := filled_in(ctx, "user_name")) is None:
        return types.InputRequiredResult(input_requests={"user_name": form("What is your name?", Name)})
    await anyio.sleep(JOB_SECONDS)
    return f"The job of {answer.get('name')} is done"


# --- Prompts ---------------------------------------------------------------------------------------------------------


class PromptContext(BaseModel):
    context: str


@server.prompt()
async def test_simple_prompt() -> str:
    """A prompt without arguments"""
    return "This is a simple prompt for testing."


@server.prompt()
async def test_prompt_with_arguments(
    arg1: Annotated[str, Field(description="First test argument")],
    arg2: Annotated[str, Field(description="Second test argument")],
) -> str:
    """A prompt with two arguments"""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt()
async def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:  # noqa: N803 (a name on the wire)
    """A prompt that brings a resource along"""
    resource = embedded(resourceUri, "Embedded resource content for testing.")
    return [UserMessage(resource), UserMessage("Please process the embedded resource above.")]


@server.prompt()
async def test_prompt_with_image() -> list[Message]:
    """A prompt that shows an image"""
    return [UserMessage(Image(data=PNG, format="png")), AssistantMessage("I see one red pixel.")]


@server.prompt()
async def test_input_required_result_prompt(ctx: Context) -> str | types.InputRequiredResult:
    """A prompt that asks the user first"""
    if (answer := filled_in(ctx, "user_context")) is None:
        question = form("What context should the prompt use?", PromptContext)
        return types.InputRequiredResult(input_requests={"user_context": question})
    return f"Use this context: {answer.get('context')}"


# --- Resources -------------------------------------------------------------------------------------------------------

WATCHED = "test://watched-resource"


@server.resource("test://static-text", mime_type="text/plain")
async def static_text() -> str:
    """Text"""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
async def static_binary() -> bytes:
    """Bytes"""
    return PNG


@server.resource("test://template/{id}/data", mime_type="application/json")
async def template_data(id: str) -> str:  # noqa: A002 (a name on the wire)
    """One resource for each id"""
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


@server.resource(WATCHED, mime_type="text/plain")
async def watched_resource() -> str:
    """Text that clients subscribe to"""
    return "Watched resource content"


# --- Lists that change while clients look on -------------------------------------------------------------------------


async def passing_tool() -> str:
    """Exists until the next change"""
    return "still here"


async def passing_prompt() -> str:
    """Exists until the next change"""
    return "still here"


@server.tool()
async def test_trigger_tool_change(ctx: Context) -> str:
    """Adds a tool, or takes it away again"""
    if any(tool.name == "passing_tool" for tool in await server.list_tools()):
        server.remove_tool("passing_tool")
    else:
        server.add_tool(passing_tool)
    await ctx.notify_tools_changed()
    return "The list of tools has changed"


@server.tool()
async def test_trigger_prompt_change(ctx: Context) -> str:
    """Adds a prompt, or takes it away again"""
    if any(prompt.name == "passing_prompt" for prompt in await server.list_prompts()):
        server.remove_prompt("passing_prompt")
    else:
        server.prompt()(passing_prompt)
    await ctx.notify_prompts_changed()
    return "The list of prompts has changed"


# --- What a client sets for the rest of its session: log level and subscriptions -------------------------------------


@dataclass
class Wishes:
    log_level: types.LoggingLevel = "debug"
    watches: set[str] = field(default_factory=set)


# By session id, in the memory of this process. A durable session may be loaded by another process later: Perdure then
# repeats `logging/setLevel` and `resources/subscribe` there, so that this dictionary is filled again.
wishes: defaultdict[str | None, Wishes] = defaultdict(Wishes)

RequestContext = ServerRequestContext[Any, Any]


def wishes_of(ctx: RequestContext) -> Wishes:
    headers = getattr(ctx.request, "headers", None) or {}
    return wishes[headers.get("mcp-session-id")]


async def log_info(ctx: Context, line: str) -> None:
    if wishes_of(ctx.request_context).log_level in ("debug", "info"):
        await ctx.info(line)


@server.tool()
async def touch_watched_resource(ctx: Context) -> str:
    """Tells this client that the watched resource has changed, if it subscribed"""
    if WATCHED in wishes_of(ctx.request_context).watches:
        await ctx.session.send_resource_updated(WATCHED)
    await ctx.notify_resource_updated(WATCHED)  # subscribers of 2026-07-28
    return "Touched"


async def set_level(ctx: RequestContext, params: types.SetLevelRequestParams) -> types.EmptyResult:
    wishes_of(ctx).log_level = params.level
    return types.EmptyResult()


async def subscribe(ctx: RequestContext, params: types.SubscribeRequestParams) -> types.EmptyResult:
    wishes_of(ctx).watches.add(str(params.uri))
    return types.EmptyResult()


async def unsubscribe(ctx: RequestContext, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
    wishes_of(ctx).watches.discard(str(params.uri))
    return types.EmptyResult()


async def complete(ctx: RequestContext, params: types.CompleteRequestParams) -> types.CompleteResult:
    words = [word for word in ("paris", "park", "party", "test") if word.startswith(params.argument.value)]
    return types.CompleteResult(completion=types.Completion(values=words, total=len(words), has_more=False))


# `MCPServer` has no decorator for most of these; the low-level server under it takes a handler for any method.
server.streamable_http_app()
low_level = server.session_manager.app
low_level.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)
low_level.add_request_handler("resources/subscribe", types.SubscribeRequestParams, subscribe)
low_level.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, unsubscribe)
low_level.add_request_handler("completion/complete", types.CompleteRequestParams, complete)
