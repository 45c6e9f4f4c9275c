"""Tests of guards, which redact and block content at every position of a stack."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import permutations
from operator import is_
from typing import Any, cast

import pytest
from msgspec import Struct
from msgspec.structs import replace

from engines.fake_server import connect_to, message_item, script
from for_each import for_each
from kedge.compaction import (
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    Replacement,
    ServerCompactor,
    TokenLimitCompactor,
    TurnCompacted,
)
from kedge.compaction.base import build_result
from kedge.conversation import Chat, Conversation
from kedge.conversation.checkpoint import WITHHELD_BODY, RunRecorder
from kedge.engines import ContentFilters, Engine, Events, Middleware, Request, find_filters
from kedge.errors import Blocked, InvalidSetting, StreamCut
from kedge.events import ReasoningDelta, RefusalDelta, TextDelta, ToolCallCompleted, Usage
from kedge.events.run import ToolFinished, ToolStarted
from kedge.middleware import (
    CARD_NUMBER,
    BaseMiddleware,
    GuardRule,
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
from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    FrozenMap,
    ImagePart,
    OpaqueBlock,
    OpaquePart,
    ReasoningBlock,
    RefusalPart,
    Source,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    UnknownBlock,
    UserBlock,
    assistant,
    audio,
    dump_block,
    file,
    image,
    reasoning,
    tool_call,
    tool_result,
    user,
)
from kedge.turns.frozen_json import thaw
from kedge.turns.json_codec import dumps
from middleware.scripted_engine import ScriptedEngine, run_stack

PIN = r"\d\d#\d\d"
HELD_BACK = (ReasoningDelta, RefusalDelta, TextDelta, ToolCallCompleted)


def apply_rules(turn: Turn, rules: tuple[GuardRule, ...]) -> Turn:
    """Return the Turn that a guard with these rules passes on."""
    guarded = guard(*rules)(ScriptedEngine())
    assert isinstance(guarded, BaseMiddleware)
    changed = guarded.enter(turn)
    assert isinstance(changed, Turn)
    return changed


ESCAPED_TEXTS = [
    r'{"id": "M\u00fcller", "n": [1, null]}',
    r'["a\ud800", "M\u00fcller"]',
    r'{"M\u00fcller": "the pin\n4711"}',
    r' "the pin\t4711"',
    json.dumps({"body": json.dumps({"name": "Müller"})}),
    "[" * 600 + r'"M\u00fcller"' + "]" * 600,
]


@for_each("text", ESCAPED_TEXTS)
def test_escaped_json_is_redacted_and_blocked(text: str) -> None:
    """Escaped text in arguments and results is redacted and blocked, and the result is still JSON."""
    turn = Turn([tool_call("f", text, call_id="c"), tool_result("c", text)])
    rules = (redact("Müller"), redact(r"pin\s\d+"))
    call, result = apply_rules(turn, rules).blocks
    assert isinstance(call, ToolCallBlock)
    assert isinstance(result, ToolResultBlock)
    for edited in (call.arguments, result.text):
        assert "redacted" in edited
        assert not re.search(r"Müller|pin\s", str(json.loads(edited)))
    with pytest.raises(Blocked):
        apply_rules(turn, (block(r"Müller|pin\s\d+"),))


@for_each(
    ("text", "expected"),
    [
        (r'{"a": "x\n", "b": "M\u00fcl', r'{"a": "x\n", "b": "M\u00fcl'),
        (r'{"a":  1.0, "b": "M\u00fcller is', r'{"a":  1.0, "b": "[redacted] is'),
        (r'result: {"b": "M\u00fcller"} (cached)', 'result: {"b": "[redacted]"} (cached)'),
    ],
)
def test_escapes_in_incomplete_json_hide_nothing(text: str, expected: str) -> None:
    """Strings are also searched in JSON that is cut off or inside of other text, which is retained."""
    turn = Turn([tool_result("c", text)])
    (result,) = apply_rules(turn, (redact("Müller"),)).blocks
    assert isinstance(result, ToolResultBlock)
    assert result.text == expected


@for_each("text", [r'{"a": "x\n",  "b": 1.0}', r"{\d+}", "[" * 5000 + r"\n"])
def test_json_that_matches_no_rule_is_unchanged(text: str) -> None:
    """JSON without a match retains its spaces and numbers, as does text that only looks like JSON."""
    turn = Turn([user(text)])
    assert apply_rules(turn, (redact("Müller"),)).blocks[0] is turn.blocks[0]


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_a_turn_or_an_answer_can_be_blocked(direction: Any) -> None:
    """A blocked Turn is not sent. The error contains the name of the rule and not the content."""
    question, answer = ("it is hunter2", "ok") if direction == "in" else ("?", "it is hunter2")
    engine = ScriptedEngine([assistant(answer)])
    rule = block("hunter2", name="passwords", direction=direction)
    with pytest.raises(Blocked) as exc_info:
        await run_stack(engine, guard(rule), turn=Turn([user(question)]))
    assert bool(engine.turns) is (direction == "out")
    assert exc_info.value.rule == "passwords"
    assert "passwords" in str(exc_info.value)
    assert "hunter2" not in str(exc_info.value)


async def test_a_partial_answer_is_redacted() -> None:
    """The Turn and the partial answer of an error are redacted like a complete answer."""
    error = StreamCut("cut")
    error.turn = Turn([user("?"), assistant("the code is 47#11")])
    error.partial = (assistant("the code is 47#11"),)
    with pytest.raises(StreamCut) as exc_info:
        await run_stack(ScriptedEngine(error), guard(redact(PIN, direction="out")))
    assert exc_info.value.turn is not None
    retained = [*exc_info.value.turn.blocks, *exc_info.value.partial]
    assert "47#11" not in repr(retained)
    assert "[redacted]" in repr(retained)


SOURCES = {"type": "search", "query": "who owns 47#11", "sources": [{"url": "x/47#11"}, "47#11"]}
ITEM = {"id": "ws_47#11", "type": "web_search_call", "status": "completed"}
SEARCH = FrozenMap({**ITEM, "action": SOURCES, "encrypted_content": "sealed with 47#11"})


async def test_text_inside_unknown_items_is_redacted() -> None:
    """Text is redacted at any depth; ids are unchanged, and encrypted content is removed."""
    run, _ = await run_stack(ScriptedEngine([OpaqueBlock(SEARCH)]), guard(redact(PIN)))
    retained = run.turn.blocks[1]
    assert isinstance(retained, OpaqueBlock)
    action = json.loads(json.dumps(SOURCES).replace("47#11", "[redacted]"))
    assert thaw(retained.item) == {**ITEM, "action": action}


async def test_blocks_without_a_match_are_unchanged() -> None:
    """Blocks of every kind without a match are returned as the same objects."""
    annotated = TextPart("ok", extra=FrozenMap({"annotations": [{"title": "t"}]}))
    video = OpaquePart(FrozenMap({"type": "video", "title": "t"}))
    blocks = [
        OpaqueBlock(SEARCH),
        UnknownBlock(FrozenMap({"kind": "dream", "text": "blue"})),
        user([annotated, video, file("https://f", filename="n.pdf")]),
        reasoning("thoughts", encrypted_content="seal"),
    ]
    assert all(map(is_, apply_rules(Turn(blocks), (redact("hunter2"),)).blocks, blocks))


def test_every_field_of_a_block_is_redacted() -> None:
    """Annotations, unknown parts, file names, extra fields and unknown blocks are redacted."""
    secret = "hunter2"
    note, item = FrozenMap({"note": secret}), FrozenMap({"item": {"note": [secret]}})
    parts = [
        TextPart("ok", extra=FrozenMap({"annotations": [{"title": secret}]})),
        OpaquePart(FrozenMap({"type": "video", "title": secret})),
        file("https://f", filename=f"{secret}.pdf"),
        image(f"https://h/i.png?key={secret}"),
        file(f"https://h/f?key={secret}"),
        ImagePart("https://h/i.png", extra=note),
        FilePart("https://h/f", extra=note),
        OpaquePart(FrozenMap({"type": "video"}), extra=note),
    ]
    blocks = [
        *(user([part]) for part in parts),
        UnknownBlock(FrozenMap({"kind": "dream", "text": secret})),
        replace(assistant("ok"), extra=item),
        replace(reasoning("thoughts", encrypted_content="seal"), extra=item),
    ]
    clean = apply_rules(Turn(blocks), (redact(secret),))
    assert dumps(Turn(blocks)).count(secret) == len(blocks)
    assert secret not in dumps(clean)
    assert "seal" not in dumps(clean)


def test_metadata_is_redacted_except_for_identifiers() -> None:
    """Texts in metadata are redacted; ids and what Kedge itself sets are unchanged."""
    given = {"note": ["hunter2"], "user_id": "hunter2", "kedge.outcome": "hunter2", "round": 2}
    (clean,) = apply_rules(Turn([user("hi", metadata=given)]), (redact("hunter2"),)).blocks
    assert thaw(clean.metadata) == {**given, "note": ["[redacted]"]}
    with pytest.raises(Blocked):
        apply_rules(Turn([user("hi", metadata=given)]), (block("hunter2"),))


def test_names_of_members_are_redacted() -> None:
    """Names that may be content are redacted and stay distinct; names of an API are unchanged."""
    item = {"type": "x", "mail_a": {"a@b.c": 1, "d@b.c": 2, "[redacted]": 3}}
    (clean,) = apply_rules(Turn([OpaqueBlock(FrozenMap(item))]), (redact("[a-z]@b.c|mail"),)).blocks
    assert isinstance(clean, OpaqueBlock)
    members = {"[redacted]_": 1, "[redacted]__": 2, "[redacted]": 3}
    assert thaw(clean.item) == {"type": "x", "mail_a": members}


def fail_on_secret(text: str) -> str:
    """Raise an error for a text with a secret."""
    if "sk-" in text:
        raise RuntimeError(text)
    return text


@pytest.mark.parametrize("edit", [fail_on_secret, lambda text: None if "sk-" in text else text])
async def test_a_rule_that_fails_lets_nothing_pass(edit: Any) -> None:
    """A rule that raises or returns no text blocks the block, and its text is shown nowhere."""
    rule = GuardRule("keys", edit)
    engine = ScriptedEngine(call(), [assistant("done")])
    stack = with_middleware(engine, guard(rule), tools(read_file))
    with pytest.raises(Blocked, match="'keys' in a user block: the rule itself failed"):
        await stack.run(Turn([user(f"It is {SECRET}.")]))
    assert not engine.turns
    with pytest.raises(Blocked, match="'keys' in a tool_result block"):
        await stack.run(Turn([user("Read it.")]))
    assert len(engine.turns) == 1
    assert ContentFilters(find_filters(stack)).edit_text(SECRET) == "[redacted]"


@for_each(
    "make",
    [
        lambda: redact("("),
        lambda: block("("),
        lambda: redact(cast("str", 3)),
        lambda: redact("a", r"\1"),
        lambda: redact("a", direction=cast("Any", "input")),
        lambda: GuardRule("a", cast("Any", "a")),
        lambda: guard(cast("GuardRule", [redact("a")])),
    ],
)
def test_invalid_rules_are_rejected(make: Callable[[], object]) -> None:
    """A rule that would never match, or fail at its first text, is rejected when it is made."""
    with pytest.raises(InvalidSetting, match="guard"):
        make()


def test_a_url_that_matches_becomes_text() -> None:
    """No server could load a redacted URL: the part is replaced by its text."""
    url, rule = "https://h/i.png?key=hunter2", "hunter2"
    (clean,) = apply_rules(Turn([user([image(url), file(url)])]), (redact(rule),)).blocks
    assert isinstance(clean, UserBlock)
    assert clean.parts == (TextPart("https://h/i.png?key=[redacted]"),) * 2
    with pytest.raises(Blocked):
        apply_rules(Turn([user([image(url)])]), (block(rule),))


def test_encoded_content_is_not_searched() -> None:
    """A rule does not match by chance in the base64 of images, files and audio."""
    content = b"\xd7\x6d\xf8" * 9  # 1234 in base64
    turn = Turn([user([image(content), file(content), audio(content)])])
    assert "1234" in dumps(turn)
    assert apply_rules(turn, (redact(r"[0-9]{4}"),)).blocks[0] is turn.blocks[0]


@pytest.mark.parametrize("text", ["plain", "47#11"])
async def test_log_probabilities_are_those_of_the_text_that_is_shown(text: str) -> None:
    """A text that is held back has its log probabilities, but not if it was edited."""
    logprobs = [{"token": text, "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    part = TextPart(text, extra=FrozenMap(logprobs=logprobs))
    engine = ScriptedEngine([AssistantBlock((part,))])
    _, events = await run_stack(engine, guard(redact(PIN)))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [list(event.logprobs) for event in deltas] == [logprobs if text == "plain" else []]


async def test_a_guard_shows_all_that_it_held_back() -> None:
    """Text, refusals, reasoning and calls are shown once, redacted, with their positions."""
    answer = AssistantBlock((TextPart("code 47#11"), RefusalPart("not 47#11")))
    shown_blocks: list[Block] = [
        ReasoningBlock(summary=("short",), texts=("long",)),
        answer,
        tool_call("f", '{"pin": "47#11"}', call_id="c"),
        OpaqueBlock(SEARCH),
    ]
    blocks = [each.with_source(Source(output_index=i)) for i, each in enumerate(shown_blocks)]
    _, events = await run_stack(ScriptedEngine(blocks), guard(redact(PIN)))
    assert [event for event in events if isinstance(event, HELD_BACK)] == [
        ReasoningDelta("short", "summary", output_index=0),
        ReasoningDelta("long", "reasoning", output_index=0),
        TextDelta("code [redacted]", output_index=1),
        RefusalDelta("not [redacted]", output_index=1, content_index=1),
        ToolCallCompleted("c", "f", '{"pin": "[redacted]"}', output_index=2),
    ]


async def test_a_redacted_item_does_not_leak_over_the_wire() -> None:
    """A secret in a server's own item type is not in the next request, which is sent in full."""
    output = [
        {"type": "mcp_call", "id": "mcp", "output": "the code is 47#11"},
        message_item("done"),
    ]
    server = script(output, output)
    async with connect_to(server.handle) as engine:
        stack = with_middleware(engine, guard(redact(PIN)))
        turn = await stack.run(Turn([user("hi")]))
        await stack.run(turn.append(user("again")))
    assert "[redacted]" in str(server.bodies[1])
    assert "47#11" not in str(server.bodies[1])
    assert "previous_response_id" not in server.bodies[1]


@for_each(
    ("text", "expected"),
    [
        *((number, "X") for number in ("4000123412341234", "378282246310005", "4222222222222")),
        *((number, "X") for number in ("4000 1234 1234 1234", "4000-1234-1234-1234")),
        *((number, "X") for number in ("3782 822463 10005", "3056-930902-5904")),
        ("4000\u00a01234\u00a01234\u00a01234", "X"),
        ("6304 0000 0000 0000 000", "X"),
        *((text, text) for text in ("2026-11-18 04:10", "call 555-123-4567", "12345 67890")),
        *((text, text) for text in ("1" * 20, "v1.2.3")),
    ],
)
def test_card_numbers_are_found_in_their_usual_formats(text: str, expected: str) -> None:
    """They are found together and in groups, and nothing around them; other numbers are left as they are."""
    rule = redact(CARD_NUMBER, "X")
    assert rule.edit(f"My card is {text}.") == f"My card is {expected}."
    assert rule.edit(f"({text}), then 12 items") == f"({expected}), then 12 items"


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


@for_each(
    ("direction", "streaming"), [("both", True), ("both", False), ("in", False), ("out", True)]
)
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
    run, events = await run_stack(engine, *stack, streaming=streaming)
    assert_clean(*engine.turns[1:])
    tool_events = [event for event in events if isinstance(event, ToolStarted | ToolFinished)]
    assert_clean(tool_events)
    if direction != "out":
        assert_clean(engine.turns[0])
    if direction != "in":
        assert_clean(run.turn, run.answers)
    assert "[redacted]" in write_out(engine.turns[1])


async def test_a_guard_inside_an_engine_applies_to_outer_middleware() -> None:
    """The rules of an engine that is already a stack apply to middleware added around it."""
    engine = ScriptedEngine(call(), [assistant("done")])
    guarded = with_middleware(engine, guard(redact(PATTERN)))
    _, events = await run_stack(guarded, tools(read_file))
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

    middleware = {"guard": guard(redact(PATTERN)), "tools": tools(act, approve=lambda _: decision)}
    engine = ScriptedEngine(call("act"), [assistant("done")])
    run, _ = await run_stack(engine, *(middleware[name] for name in order))
    assert_clean(run.turn, *engine.turns)
    assert "sk-" not in write_out(engine.turns[1])


async def test_a_tool_inside_a_guard_gets_unredacted_arguments() -> None:
    """The position of the guard determines whether a tool receives redacted arguments."""
    paths: list[str] = []

    def open_path(path: str) -> str:
        """Open a path."""
        paths.append(path)
        return "ok"

    stack = [guard(redact(PATTERN)), tools(open_path)]
    for order in (stack, reversed(stack)):
        engine = ScriptedEngine(call("open_path", f'{{"path": "{SECRET}"}}'), [assistant("done")])
        run, _ = await run_stack(engine, *order)
        assert_clean(run.turn)
    assert paths == [SECRET, "[redacted]"]


@pytest.mark.parametrize("order", [("guard", "tools"), ("tools", "guard")], ids="-".join)
async def test_a_result_can_be_blocked(order: tuple[str, ...]) -> None:
    """The run ends before a blocked tool result is sent."""
    middleware = {"guard": guard(block(PATTERN, name="keys")), "tools": tools(read_file)}
    engine = ScriptedEngine(call(), [assistant("done")])
    with pytest.raises(Blocked, match="keys"):
        await run_stack(engine, *(middleware[name] for name in order))
    assert len(engine.turns) == 1


async def test_redactions_by_filters_are_traced() -> None:
    """Redactions outside the guard's own position are traced under its name."""

    class Noting(BaseMiddleware):
        name = "noting"

        def events(self, turn: Turn, request: Request) -> Events:
            return self.inner.events(turn.append(user(f"It is {SECRET}")), request)

    engine = ScriptedEngine([assistant("done")])
    run, _ = await run_stack(engine, guard(redact(PATTERN)), Noting)
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
        self.given.append(request.blocks)
        summary = Replacement((user(f"summary of {SECRET}"),), usage=Usage(7))
        return build_result(request, summary, "summarizer")


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
    stack = [*(middleware[name] for name in order), retry(1)]
    run, events = await run_stack(engine, *stack, turn=Turn([user(f"It is {SECRET}")]))
    compacted = [event for event in events if isinstance(event, TurnCompacted)]
    assert len(summarizer.given) >= 2
    assert_clean(summarizer.given, compacted, run.turn, *engine.turns)


async def test_a_blocked_summary_is_discarded() -> None:
    """The answer is returned, and the conversation continues uncompacted."""
    engine = ScriptedEngine([assistant("Fine.")])
    run, events = await run_stack(engine, compact(_Summarizer()), guard(block(PATTERN)))
    (compacted,) = [event for event in events if isinstance(event, TurnCompacted)]
    assert list(run.turn.blocks) == [user("?"), assistant("Fine.")]
    assert "a guard rejected its result" in str(compacted.result)
    assert compacted.result.usage == Usage(7)


@pytest.mark.parametrize("rule", [redact, block])
async def test_rules_for_the_way_out_do_not_change_messages_of_the_user(rule: Any) -> None:
    """Compaction before a request applies only the rules for the way in."""
    chat = Chat(
        ScriptedEngine([assistant("Fine.")]),
        compactor=MessageLimitCompactor(1),
        middleware=[guard(rule(PATTERN, direction="out"))],
    )
    turn = Turn([user("one"), user(f"It is {SECRET}")])
    state = await chat.compact_pending(chat.write_state(None, turn))
    assert list(chat.read_state(state).blocks) == [user(f"It is {SECRET}")]


@pytest.mark.parametrize("order", [("guard", "compact"), ("compact", "guard")], ids="-".join)
async def test_content_for_provider_counts_and_compaction_is_redacted(
    order: tuple[str, ...],
) -> None:
    """The separate requests that count tokens and compact are redacted as well."""
    compactors = [ServerCompactor(1, "endpoint"), TokenLimitCompactor(1, counter=ProviderCounter())]
    with serve() as server:
        async with connect(f"responses:{server.base_url}#practice", max_retries=0) as engine:
            summarizer = compact(CompositeCompactor(*compactors))
            middleware = {"guard": guard(redact(PATTERN)), "compact": summarizer}
            turn = Turn([user(f"It is {SECRET}"), assistant("Fine."), user(f"Again: {SECRET}")])
            await run_stack(engine, *(middleware[name] for name in order), turn=turn)
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
    base = with_middleware(engine, rules) if inside else engine
    chat = Chat(base, tools=[read_file], middleware=[] if inside else [rules])
    states = [chat.write_state(None, Turn([user(f"It is {SECRET}")]))]
    written = chat.read_state(states[0])
    edited = user(f"No, {SECRET}", id=written[0].id)
    states += [chat.write_state(states[0], written.edit(edited.id, edited))]
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
    cut = StreamCut(f"cut after {SECRET}")
    said, summary = [assistant(f"It is {SECRET}")], [assistant(f"all {SECRET}")]
    engine = ScriptedEngine(call(), said, call(), cut, summary)
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
    stack = with_middleware(ScriptedEngine(), guard(redact(PATTERN)))
    recorder = RunRecorder(filters=ContentFilters(find_filters(stack)))
    recorder.record_exchange(b"{}", f'{{"output": [{{"text": "{SECRET}"}}]}}'.encode(), 200)
    recorder.record_exchange(b"{}", b'data: {"delta": "sk-"}\n\ndata: {"delta": "4711"}\n\n', 200)
    recorder.record_exchange(b"{}", rb'["\ud800"]', 200)
    replies = [each.reply for each in recorder.recorded.exchanges]
    expected = [b'{"output": [{"text": "[redacted]"}]}', WITHHELD_BODY, rb'["\ud800"]']
    assert replies == expected
