"""Tests that a guard's rules apply at every position of a stack to all content of tools."""

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import permutations
from typing import Any, cast

import pytest
from msgspec import Struct

from for_each import for_each
from kedge.chat import Chat
from kedge.compaction import (
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    ServerCompactor,
    TokenLimitCompactor,
    TurnCompacted,
)
from kedge.conversation import Conversation
from kedge.engines import Engine, Events, Middleware, Request
from kedge.errors import Blocked, StreamCut
from kedge.events.run import ToolFinished, ToolStarted
from kedge.middleware import (
    BaseMiddleware,
    block,
    compact,
    guard,
    log,
    redact,
    repair,
    retry,
    system_prompt,
    tools,
    two_phase,
    with_middleware,
)
from kedge.middleware.compact import Compactor
from kedge.providers import connect
from kedge.store import open_store
from kedge.testing import serve
from kedge.tools import Deny, Edit, tool
from kedge.turns import Block, Turn, assistant, dump_block, tool_call, user
from kedge.turns.json_codec import dumps
from middleware.scripted_engine import ScriptedEngine

SECRET = "sk-4711"
PATTERN = r"sk-\d+"


def read_file(path: str = "") -> str:
    """Return the content of a file."""
    return f"the key is {SECRET}"


def fail(path: str = "") -> str:
    """Raise an error that quotes the content."""
    raise ValueError("x" * 1_996 + SECRET)


def call(name: str = "read_file", arguments: str = "{}") -> list[Block]:
    return [tool_call(name, arguments, call_id="call_1")]


MIDDLEWARE: dict[str, Callable[[], Middleware]] = {
    "repair": repair,
    "guard": lambda: guard(redact(PATTERN)),
    "tools": lambda: tools(read_file, fail),
    "system_prompt": lambda: system_prompt(f"The admin key is {SECRET}."),
}
ORDERS = list(permutations(MIDDLEWARE))


def write_out(value: object) -> str:
    """Return all content of a value: a ``repr`` of a block is shortened."""
    match value:
        case Turn():
            return dumps(value)
        case _ if isinstance(value, Block):
            return json.dumps(dump_block(value))
        case list() | tuple():
            return "".join(map(write_out, cast("list[object]", value)))
        case _ if is_dataclass(value):
            return "".join(write_out(getattr(value, each.name)) for each in fields(value))
        case Struct():
            return "".join(write_out(getattr(value, name)) for name in value.__struct_fields__)
        case _:
            return str(value)


def assert_clean(*values: object) -> None:
    assert SECRET not in write_out(values)


@for_each("streaming", [True, False])
@for_each("direction", ["both", "in", "out"])
@for_each("order", ORDERS)
async def test_no_tool_result_is_sent_or_shown_in_any_order(
    order: tuple[str, ...], direction: Any, streaming: bool
) -> None:
    """Neither the engine nor the caller receives the secret from a tool result."""
    engine = ScriptedEngine(
        call("read_file", f'{{"path": "{SECRET}"}}'), call("fail"), [assistant(f"It is {SECRET}.")]
    )
    stack = [MIDDLEWARE[name]() for name in order if name != "system_prompt" or direction != "out"]
    if direction != "both":
        at = order.index("guard") - (
            direction == "out" and order.index("system_prompt") < order.index("guard")
        )
        stack[at] = guard(redact(PATTERN, direction=direction))
    async with with_middleware(engine, *stack).stream(
        Turn([user("?")]), streaming=streaming
    ) as run:
        events = [event async for event in run]
    assert_clean(*engine.turns[1:])
    tool_events = [event for event in events if isinstance(event, ToolStarted | ToolFinished)]
    assert_clean(tool_events)
    if direction != "out":
        assert_clean(engine.turns[0])
    if direction != "in":
        assert_clean(run.turn, run.answers)
    assert "[redacted]" in write_out(engine.turns[1])


async def test_hand_composed_middleware_is_guarded_too() -> None:
    """A guard applies to the middleware inside it without ``with_middleware``."""
    engine = ScriptedEngine(call(), [assistant("done")])
    inner: Engine = tools(read_file)(system_prompt(f"It is {SECRET}")(engine))
    turn = await guard(redact(PATTERN))(inner).run(Turn([user("?")]))
    assert_clean(*engine.turns, turn)


async def test_a_guard_inside_an_engine_applies_to_outer_middleware() -> None:
    """The rules of an engine that is already a stack apply to middleware added around it."""
    engine = ScriptedEngine(call(), [assistant("done")])
    guarded = with_middleware(engine, guard(redact(PATTERN)))
    async with with_middleware(guarded, tools(read_file)).stream(Turn([user("?")])) as run:
        events = [event async for event in run]
    assert_clean(events, *engine.turns)


@pytest.mark.parametrize(
    "decision", [Deny(f"not with {SECRET}"), Edit({"path": "y" * 1_985 + SECRET})]
)
@pytest.mark.parametrize("order", [("guard", "tools"), ("tools", "guard")], ids="-".join)
async def test_approver_output_is_redacted(order: tuple[str, ...], decision: Any) -> None:
    """Reasons and changed arguments are redacted before they are truncated."""

    @tool(approval=True)
    def act(path: str = "") -> str:
        """Act on a path."""
        return "done"

    middleware = {
        "guard": guard(redact(PATTERN)),
        "tools": tools(act, approve=lambda _: decision),
    }
    engine = ScriptedEngine(call("act"), [assistant("done")])
    turn = await with_middleware(engine, *(middleware[name] for name in order)).run(
        Turn([user("?")])
    )
    assert_clean(turn, *engine.turns)
    assert "sk-" not in write_out(engine.turns[1])


async def test_a_tool_inside_a_guard_gets_unredacted_arguments() -> None:
    """The position of the guard determines whether a tool receives redacted arguments."""
    paths: list[str] = []

    def open_path(path: str) -> str:
        """Open a path."""
        paths.append(path)
        return "ok"

    for order in (
        [guard(redact(PATTERN)), tools(open_path)],
        [tools(open_path), guard(redact(PATTERN))],
    ):
        engine = ScriptedEngine(call("open_path", f'{{"path": "{SECRET}"}}'), [assistant("done")])
        assert_clean(await with_middleware(engine, *order).run(Turn([user("?")])))
    assert paths == [SECRET, "[redacted]"]


@pytest.mark.parametrize("order", [("guard", "tools"), ("tools", "guard")], ids="-".join)
async def test_a_result_can_be_blocked(order: tuple[str, ...]) -> None:
    """The run ends before a blocked tool result is sent."""
    middleware = {"guard": guard(block(PATTERN, name="keys")), "tools": tools(read_file)}
    engine = ScriptedEngine(call(), [assistant("done")])
    with pytest.raises(Blocked, match="keys"):
        await with_middleware(engine, *(middleware[name] for name in order)).run(Turn([user("?")]))
    assert len(engine.turns) == 1


async def test_redactions_by_filters_are_traced() -> None:
    """Redactions outside the guard's own position are traced under its name."""

    class Noting(BaseMiddleware):
        name = "noting"

        def events(self, turn: Turn, request: Request) -> Events:
            return self.inner.events(turn.append(user(f"It is {SECRET}")), request)

    engine = ScriptedEngine([assistant("done")])
    async with with_middleware(engine, guard(redact(PATTERN)), Noting).stream(Turn([])) as run:
        await run.finish()
    assert [(event.by, event.phase) for event in run.trace] == [("noting", "in"), ("guard", "in")]
    assert_clean(*engine.turns)


async def test_a_middleware_that_calls_run_is_guarded() -> None:
    """The rules apply to a middleware that calls ``run`` instead of passing the request on."""
    engine = ScriptedEngine([assistant("draft")], [assistant("done")])

    async def draft(turn: Turn) -> Turn:
        return await engines[0].run(turn.append(user(f"draft with {SECRET}")))

    engines: list[Engine] = []

    def drafting(inner: Engine) -> Engine:
        engines.append(inner)
        return two_phase(draft)(inner)

    await with_middleware(engine, guard(redact(PATTERN)), log(), drafting).run(Turn([user("?")]))
    assert_clean(*engine.turns)


class _Summarizer(Compactor):
    """A compactor that records its input."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    async def compact(self, request: Any) -> Any:
        from kedge.compaction.base import build_result

        self.given.append(request.blocks)
        return build_result(request, (user(f"summary of {SECRET}"),), "summarizer")


@for_each("order", list(permutations(("guard", "compact", "tools"))))
async def test_a_compactor_receives_and_returns_redacted_content(order: tuple[str, ...]) -> None:
    """Compaction before a resend and after an answer is redacted in any order of the stack."""
    summarizer = _Summarizer()
    middleware = {
        "guard": guard(redact(PATTERN)),
        "compact": compact(summarizer, resend_limit=1),
        "tools": tools(read_file),
    }
    engine = ScriptedEngine(call(), [assistant(f"It is {SECRET}")])
    stack = with_middleware(engine, *(middleware[name] for name in order), retry(1))
    async with stack.stream(Turn([user(f"It is {SECRET}")])) as run:
        compacted = [event async for event in run if isinstance(event, TurnCompacted)]
    assert len(summarizer.given) >= 2
    assert_clean(summarizer.given, compacted, run.turn, *engine.turns)


async def test_a_blocked_summary_is_discarded() -> None:
    """The answer is returned, and the conversation continues uncompacted."""
    stack = with_middleware(
        ScriptedEngine([assistant("Fine.")]), compact(_Summarizer()), guard(block(PATTERN))
    )
    async with stack.stream(Turn([user("?")])) as run:
        (compacted,) = [event async for event in run if isinstance(event, TurnCompacted)]
    assert list(run.turn.blocks) == [user("?"), assistant("Fine.")]
    assert "a guard rejected its result" in str(compacted.result)


@pytest.mark.parametrize("rule", [redact, block])
async def test_rules_for_the_way_out_do_not_change_messages_of_the_user(rule: Any) -> None:
    """Compaction before a request applies only the rules for the way in."""
    chat = Chat(
        ScriptedEngine([assistant("Fine.")]),
        compactor=MessageLimitCompactor(1),
        middleware=[guard(rule(PATTERN, direction="out"))],
    )
    state = await chat.compact_pending(
        chat.write_state(None, Turn([user("one"), user(f"It is {SECRET}")]))
    )
    assert list(chat.read_state(state).blocks) == [user(f"It is {SECRET}")]


@pytest.mark.parametrize("order", [("guard", "compact"), ("compact", "guard")], ids="-".join)
async def test_content_for_provider_counts_and_compaction_is_redacted(
    order: tuple[str, ...],
) -> None:
    """The separate requests that count tokens and compact are redacted as well."""
    compactors = [
        ServerCompactor(1, "endpoint"),
        TokenLimitCompactor(1, counter=ProviderCounter()),
    ]
    with serve() as server:
        async with connect(f"responses:{server.base_url}#practice", max_retries=0) as engine:
            middleware = {
                "guard": guard(redact(PATTERN)),
                "compact": compact(CompositeCompactor(*compactors)),
            }
            turn = Turn([user(f"It is {SECRET}"), assistant("Fine."), user(f"Again: {SECRET}")])
            await with_middleware(engine, *(middleware[name] for name in order)).run(turn)
        paths = {request.path for request in server.requests}
        bodies = b"".join(request.raw for request in server.requests)
    assert {"/v1/responses/input_tokens", "/v1/responses/compact"} <= paths
    assert b"redacted" in bodies
    assert SECRET.encode() not in bodies


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("inside", [True, False])
async def test_a_chat_state_holds_no_secret(inside: bool, streaming: bool) -> None:
    """The state has no secret during a stream, after it, after an error and after an append."""
    failure = StreamCut("cut")
    engine = ScriptedEngine(call(), [assistant(f"It is {SECRET}")], call(), failure)
    rules = guard(redact(PATTERN))
    chat = (
        Chat(with_middleware(engine, rules), tools=[read_file])
        if inside
        else Chat(engine, tools=[read_file], middleware=[rules])
    )
    states = [chat.write_state(None, Turn([user(f"It is {SECRET}")]))]
    async with chat.stream_with_state(states[0], f"{SECRET}?", streaming=streaming) as run:
        states += [run.state]
        async for _ in run:
            states.append(run.state)
    states += [run.reply.state]
    with pytest.raises(StreamCut) as exc_info:
        await chat.chat_with_state(run.reply.state, f"{SECRET}?")
    states += [exc_info.value.state]  # pyright: ignore[reportAttributeAccessIssue]
    assert_clean(states, run.reply.text, run.reply.turn, *engine.turns)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("inside", [True, False])
async def test_a_store_holds_no_secret(inside: bool, streaming: bool) -> None:
    """An export has no secret in questions, results, answers, failures, edits and summaries."""
    failure = StreamCut(f"cut after {SECRET}")
    answers = [
        call(),
        [assistant(f"It is {SECRET}")],
        call(),
        failure,
        [assistant(f"all {SECRET}")],
    ]
    engine = ScriptedEngine(*answers)
    rules = guard(redact(PATTERN))
    base = with_middleware(engine, rules) if inside else engine
    middleware = [] if inside else [rules]
    async with open_store("sqlite://:memory:") as store:
        conversation = await Conversation.create(
            base, store=store, blocks=[f"It is {SECRET}"], tools=[read_file], middleware=middleware
        )
        await conversation.append(f"And {SECRET}")
        await conversation.edit(conversation.turn.blocks[0].id, f"No, {SECRET}")
        await conversation.send(f"{SECRET}?", streaming=streaming)
        with pytest.raises(StreamCut):
            await conversation.send(f"{SECRET}?", streaming=streaming)
        await conversation.merge_summary_of(conversation)
        assert_clean(await conversation.export(), conversation.turn, *engine.turns)
        assert await Conversation.search(store, "4711") == []
        rows = await conversation.responses()
    assert_clean([row.error for row in rows])


async def test_stored_bodies_are_redacted() -> None:
    """A JSON reply is redacted, and a stream, which splits text into deltas, is withheld."""
    from kedge.conversation.checkpoint import WITHHELD_BODY, RunRecorder
    from kedge.engines import ContentFilters, find_filters

    stack = with_middleware(ScriptedEngine(), guard(redact(PATTERN)))
    recorder = RunRecorder(filters=ContentFilters(find_filters(stack)))
    recorder.record_exchange(b"{}", f'{{"output": [{{"text": "{SECRET}"}}]}}'.encode(), 200)
    recorder.record_exchange(b"{}", b'data: {"delta": "sk-"}\n\ndata: {"delta": "4711"}\n\n', 200)
    recorder.record_exchange(b"{}", rb'["\ud800"]', 200)
    assert [each.reply for each in recorder.recorded.exchanges] == [
        b'{"output": [{"text": "[redacted]"}]}',
        WITHHELD_BODY,
        rb'["\ud800"]',
    ]
