"""The compactors: when they compact, which blocks remain, what they report, and what holds for any history."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction.histories import (
    FunctionEngine,
    histories,
    make_exchanges,
    pairing_problems,
    run_immediately,
)
from for_each import for_each
from kedge.compaction import (
    AllTriggers,
    AnyTrigger,
    CompactionRequest,
    CompactionResult,
    Compactor,
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    ServerCompactor,
    SplitCompactor,
    SummarizingCompactor,
    TokenLimitCompactor,
    ToolExchangeCompactor,
    advance_to_first_user_message,
    compact_turn,
    cut_points,
    is_summary,
    run_compactor,
)
from kedge.engines.output_schema import CORRECTION_ORIGIN
from kedge.errors import InvalidSetting
from kedge.events import Usage
from kedge.middleware import compact
from kedge.planning import ConversationState, get_state, plan_request, record_response, set_state
from kedge.turns import (
    Block,
    Turn,
    UserBlock,
    assistant,
    opaque,
    system,
    tool_call,
    tool_result,
    user,
)


class FixedTrigger:
    """A trigger that returns a fixed value and counts its calls."""

    def __init__(self, verdict: bool = True) -> None:
        self.verdict = verdict
        self.call_count = 0

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return the fixed value."""
        self.call_count += 1
        return self.verdict


class AsyncTrigger(FixedTrigger):
    """A trigger like ``FixedTrigger`` with an async method."""

    async def should_compact(self, request: CompactionRequest) -> bool:  # type: ignore[override]
        """Return the fixed value."""
        return super().should_compact(request)


class Strategy:
    """A strategy that is a function of the blocks, by default one that retains the newest exchange."""

    def __init__(self, function: Callable[[Any], Any] = lambda blocks: blocks[-2:]) -> None:
        self.function = function

    def compact_blocks(self, request: CompactionRequest) -> Any:
        """Return what the function makes of the blocks."""
        return self.function(request.blocks)


def compact_now(compactor: Any, blocks: tuple[Block, ...], **more: Any) -> CompactionResult:
    """Run a compactor on blocks and return its result."""
    return run_immediately(run_compactor(compactor, CompactionRequest(blocks, **more)))


def test_message_limit_retains_the_last_messages() -> None:
    """At the limit nothing changes; above it the newest blocks remain, starting with a user block."""
    assert not compact_now(MessageLimitCompactor(4), make_exchanges(2)).changed
    result = compact_now(MessageLimitCompactor(4), make_exchanges(3))
    assert result.blocks == make_exchanges(3)[2:]
    assert [block.kind for block in result.removed] == ["user", "assistant"]


def test_server_usage_overrides_the_counter() -> None:
    """The server's token count is used if present, because it includes tools and instructions."""
    blocks = make_exchanges(20)
    usage = Usage(input_tokens=5_000, output_tokens=100, reasoning_tokens=50)
    counted = CompactionRequest(blocks).count(blocks)
    assert not compact_now(TokenLimitCompactor(6_000), blocks, usage=usage).changed
    result = compact_now(TokenLimitCompactor(5_000, 4_900), blocks, usage=usage)
    assert result.tokens_before == 5_050
    assert result.tokens_after is not None
    assert result.tokens_after <= 4_900
    assert CompactionRequest(blocks).count(result.blocks) <= counted - 150


def test_leading_system_blocks_are_counted_and_retained() -> None:
    """Leading system blocks are part of every request, so they count toward the limit and remain."""
    lead = (system("Be kind. " * 60),)
    request = CompactionRequest(make_exchanges(5), lead)
    result = compact_now(TokenLimitCompactor(300, 250), make_exchanges(5), leading=lead)
    assert result.changed
    assert request.count(lead) + request.count(result.blocks) <= 250


def test_provider_counter_falls_back_to_the_default() -> None:
    """Without a provider that counts tokens, ``ProviderCounter`` gives the default counter's result."""
    blocks = make_exchanges(20)
    counted = compact_now(TokenLimitCompactor(200), blocks)
    requested = compact_now(TokenLimitCompactor(200, counter=ProviderCounter()), blocks)
    assert requested.blocks == counted.blocks


def test_custom_counter() -> None:
    """A compactor uses the counter passed to it."""

    class Characters:
        def count_text(self, text: str) -> int:
            return len(text)

        def count_items(self, items: Any) -> int:
            return sum(len(str(item)) for item in items)

    result = compact_now(TokenLimitCompactor(1_000, counter=Characters()), make_exchanges(20))
    assert 2 <= len(result.blocks) < 20


def test_composite_runs_compactors_in_order() -> None:
    """Each compactor gets the result of the previous one, and the results are combined into one."""
    compactor = CompositeCompactor(MessageLimitCompactor(8), MessageLimitCompactor(6, 4))
    result = compact_now(compactor, make_exchanges(6))
    assert (len(result.blocks), len(result.removed)) == (4, 8)
    assert result.by == "MessageLimitCompactor, MessageLimitCompactor"
    assert result.tokens_before == CompactionRequest(make_exchanges(6)).size()
    assert result.tokens_after == CompactionRequest(result.blocks).size()
    assert not compact_now(CompositeCompactor(), make_exchanges(3)).changed
    compactor = CompositeCompactor(MessageLimitCompactor(2), TokenLimitCompactor(4_800))
    result = compact_now(compactor, make_exchanges(20), usage=Usage(5_000))
    assert (result.by, result.notes) == ("MessageLimitCompactor", ())


def test_composite_continues_after_a_failure() -> None:
    """A failing compactor is reported in a note, and the next one still runs."""

    class Broken:
        async def compact(self, request: CompactionRequest) -> CompactionResult:
            raise ZeroDivisionError

    result = compact_now(CompositeCompactor(Broken(), MessageLimitCompactor(2)), make_exchanges(3))
    assert len(result.blocks) == 2
    assert result.notes == ("Broken failed (ZeroDivisionError); nothing was changed",)


def test_any_trigger_works_with_any_strategy() -> None:
    """Triggers and strategies may have plain or async methods, and a strategy may return only blocks."""
    never = SplitCompactor(FixedTrigger(False), Strategy())
    assert not compact_now(never, make_exchanges(3)).changed
    for trigger in (FixedTrigger(), AsyncTrigger()):
        result = compact_now(SplitCompactor(trigger, Strategy()), make_exchanges(3))
        assert result.blocks == make_exchanges(3)[-2:]
        assert result.by == f"{type(trigger).__name__}+Strategy"


@for_each("one", [True, False])
@for_each("other", [True, False])
def test_combined_triggers(one: bool, other: bool) -> None:
    """``AnyTrigger`` is a logical or, ``AllTriggers`` a logical and; without triggers both are false."""
    cases = ((AnyTrigger, one or other, not one), (AllTriggers, one and other, one))
    for combine, expected, is_asked in cases:
        second = AsyncTrigger(other)
        combined = combine(FixedTrigger(one), second)
        assert run_immediately(combined.should_compact(CompactionRequest(()))) is expected
        assert second.call_count == is_asked
        assert not run_immediately(combine().should_compact(CompactionRequest(())))


def summarize(
    answer: str = "short", blocks: Any = None, **options: Any
) -> tuple[CompactionResult, FunctionEngine]:
    """Summarize a history of 20 exchanges with a model that gives this answer."""
    oracle = FunctionEngine(lambda _: answer)
    compactor = SummarizingCompactor(200, 60, engine=oracle, **options)
    return compact_now(compactor, blocks or make_exchanges(20)), oracle


def test_summary_replaces_the_old_blocks() -> None:
    """The newest blocks are unchanged, and the summary is marked in its text and its metadata."""
    result, oracle = summarize("They counted to ten.")
    summary, *newest = result.blocks
    assert isinstance(summary, UserBlock)
    assert is_summary(summary)
    assert summary.text == "[Summary of the conversation so far]\nThey counted to ten."
    assert summary.origin == "SummarizingCompactor"
    assert tuple(newest) == make_exchanges(20)[-len(newest) :]
    assert summary.metadata["kedge.summary"] == 40 - len(newest)
    assert result.usage == Usage(10, 0, 5, 0, 15)
    assert oracle.turns[0].blocks[:-1] == make_exchanges(20)[: 40 - len(newest)]


def test_earlier_summary_is_included_in_the_new_one() -> None:
    """The model gets the earlier summary, and the new one counts the blocks that both replace."""
    oracle = FunctionEngine(lambda turn: f"of {len(turn)} blocks")
    compactor = SummarizingCompactor(200, 60, engine=oracle)
    first = compact_now(compactor, make_exchanges(20))
    second = compact_now(compactor, (*first.blocks, *make_exchanges(10)))
    assert oracle.turns[1].blocks[0] == first.blocks[0]
    assert [is_summary(block) for block in second.blocks].count(True) == 1
    retained = len(second.blocks) - 1
    assert second.blocks[0].metadata["kedge.summary"] == 60 - retained


@for_each(
    ("answer", "blocks", "note"),
    [
        ("fail", (), "the summary call failed (ServerFailed); nothing was cut"),
        ("", (), "the summary is empty or no shorter than what it summarizes; nothing was cut"),
        (
            "as long",
            [user("a"), assistant("b"), user("x " * 500), assistant("y")],
            "the summary is empty or no shorter than what it summarizes; nothing was cut",
        ),
        ("x", [user("x " * 500), assistant("y")], "there is nothing old enough to summarize"),
    ],
)
def test_unusable_summary_is_not_used(answer: str, blocks: list[Block], note: str) -> None:
    """A failed or empty summary leaves the history unchanged, and one exchange is not summarized."""
    result, oracle = summarize(answer, tuple(blocks))
    assert (result.changed, len(oracle.turns)) == (False, 0 if answer == "x" else 1)
    assert result.notes == (note,)


@for_each(("settings", "limit"), [({}, 150), ({"max_summary_tokens": 50}, 50)])
def test_long_summary_is_truncated(settings: Any, limit: int) -> None:
    """A summary that is too long is truncated, so that several exchanges fit before the next compaction."""
    oracle = FunctionEngine(lambda _: "x " * 5_000)
    compactor = SummarizingCompactor(400, 100, engine=oracle, **settings)
    result = compact_now(compactor, make_exchanges(40))
    request = CompactionRequest(result.blocks)
    assert limit - 10 < request.count(result.blocks[:1]) <= limit
    assert result.notes[0].startswith("the summary had ")
    following = CompactionRequest((*result.blocks, *make_exchanges(4)))
    assert not compactor.should_compact(following)


untyped: Any = partial


@for_each(
    ("make", "arguments", "message"),
    [
        (CompositeCompactor, [[MessageLimitCompactor(2)]], "which list has not"),
        (CompositeCompactor, [MessageLimitCompactor], "not the class MessageLimit"),
        (CompositeCompactor, [FixedTrigger()], r"compact\(request\), which FixedTrigger"),
        (SplitCompactor, [Strategy(), FixedTrigger()], "which Strategy has not"),
        (SplitCompactor, [FixedTrigger(), FixedTrigger()], "compact_blocks"),
        (SplitCompactor, [FixedTrigger, Strategy()], "not the class FixedTrigger"),
        (AnyTrigger, [[FixedTrigger()]], "which list has not"),
        (AllTriggers, [Strategy()], "which Strategy has not"),
        (compact, [Strategy()], "which Strategy has not"),
        (untyped(compact, engine="practice"), [MessageLimitCompactor(2)], "engine must"),
        (untyped(compact, counter=5), [MessageLimitCompactor(2)], "counter must"),
        (untyped(SummarizingCompactor, engine="practice"), [10], "engine must have a method"),
        (untyped(TokenLimitCompactor, counter=5), [10], "counter must have a method"),
        (ProviderCounter, ["practice"], "engine must have a method"),
        (ServerCompactor, [10, "managed"], "how must be one of context_management, endpoint"),
    ],
)
def test_invalid_composition_is_rejected(make: Any, arguments: list[Any], message: str) -> None:
    """An invalid argument is rejected on construction, because later errors would only be logged."""
    with pytest.raises(InvalidSetting, match=message):
        make(*arguments)


def test_summary_without_an_engine_is_reported() -> None:
    """Without an engine no summary is created, and a note reports it."""
    result = compact_now(SummarizingCompactor(200, 60), make_exchanges(20))
    assert result.notes == ("the summary call failed (KedgeError); nothing was cut",)


def test_summary_model_can_be_configured() -> None:
    """A summary can be requested from another model of the same engine."""
    _, oracle = summarize(model="small")
    assert oracle.requests[0].model == "small"


def test_summary_is_not_requested_in_conversation_mode() -> None:
    """A summary is requested in chained mode, so that it is not added to the conversation object."""

    class InObjects(FunctionEngine):
        def plan(self, turn: Turn, **options: Any) -> Any:
            mode = options.get("mode", "conversation")
            return plan_request(turn, scope="oracle", mode=mode, now=0.0)

    oracle = InObjects(lambda _: "short")
    compact_now(SummarizingCompactor(200, 60, engine=oracle), make_exchanges(20))
    assert oracle.requests[0].mode == "chained"


def test_provider_without_compaction_is_reported() -> None:
    """If the provider cannot compact, a note reports it and nothing changes."""
    oracle = FunctionEngine(lambda _: "")
    result = compact_now(ServerCompactor(100, "endpoint"), make_exchanges(20), engine=oracle)
    assert result.notes == ("this engine's provider does not compact",)
    assert not compact_now(ServerCompactor(1_000), make_exchanges(20)).changed


class CompactingEngine(FunctionEngine):
    """An engine whose server retains a message."""

    async def compact(self, turn: Turn) -> tuple[list[Block], Usage]:
        """Return a long item."""
        item = opaque({"type": "compaction", "encrypted_content": "x" * 4_000})
        return [item, user("kept")], Usage(1)


def test_endpoint_compacts_only_what_is_new() -> None:
    """What the server returned replaces the history, and is not compacted again."""
    compactor, engine = ServerCompactor(100, "endpoint"), CompactingEngine(lambda _: "")
    result = compact_now(compactor, make_exchanges(20), engine=engine)
    assert [block.kind for block in result.blocks] == ["opaque", "user", "user", "assistant"]
    again = (result.blocks[0], *make_exchanges(2, "a"))
    assert not compact_now(compactor, again, engine=engine).changed


def test_cut_points_are_user_blocks_without_open_calls() -> None:
    """A history can be cut at a user block, unless a call before it has no result or it corrects a typed answer."""
    blocks = (
        user("a"),
        tool_call("f", "{}", call_id="c1"),
        user("an event"),
        tool_result("c1", "yes"),
        assistant("b"),
        user("c"),
        assistant("3?"),
        user("This is no JSON.", origin=CORRECTION_ORIGIN),
        tool_call("f", "{}", call_id="c2"),
        user("d"),
    )
    assert cut_points(blocks) == [0, 5]


def test_advance_to_first_user_message() -> None:
    """``advance_to_first_user_message`` drops the blocks before the first user block from an index on."""
    blocks = (assistant("x"), user("a"), assistant("b"), user("c"))
    assert advance_to_first_user_message(blocks) == blocks[1:]
    assert advance_to_first_user_message(blocks, 2) == blocks[3:]
    assert advance_to_first_user_message(blocks[:1]) == ()


@for_each(
    "make",
    [
        lambda: MessageLimitCompactor(0),
        lambda: MessageLimitCompactor(4, 5),
        lambda: MessageLimitCompactor(True),
        lambda: TokenLimitCompactor(-1),
        lambda: TokenLimitCompactor(10, 20),
        lambda: SummarizingCompactor(10, 20),
        lambda: SummarizingCompactor(10, max_summary_tokens=20),
        lambda: ServerCompactor(0),
    ],
)
def test_invalid_limits_are_rejected(make: Any) -> None:
    """Invalid limits are rejected on construction."""
    with pytest.raises(InvalidSetting):
        make()


@pytest.mark.parametrize(
    "function",
    [
        lambda blocks: blocks[3:],  # starts with a result
        lambda _: (),
        lambda blocks: (system("summary"), *blocks[-1:]),
        lambda blocks: (*blocks, blocks[0]),
        lambda _: ("no block",),
        lambda _: None,
    ],
)
def test_invalid_strategy_result_is_not_used(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A result that splits a pair, is empty or starts with a system block is logged and not used."""
    call = (user("a"), tool_call("f", "{}", call_id="c"), assistant("x"), tool_result("c", "y"))
    with caplog.at_level(logging.WARNING, "kedge.compaction"):
        result = compact_now(SplitCompactor(FixedTrigger(), Strategy(function)), call)
    assert result.blocks == call
    assert "failed" in result.notes[0]
    assert len(caplog.records) == 1


def test_cut_invalidates_all_anchors() -> None:
    """A shortened Turn has the same id, data, mode and leading blocks, and is sent in full."""
    turn = set_state(Turn([system("Be kind.")], data={"mine": 1}), ConversationState("chained"))
    for number in range(3):
        turn = turn.append(user(f"{number}?"))
        plan = plan_request(turn, scope="s", now=float(number))
        facts: Any = {"response_id": f"r{number}", "plan": plan, "created_at": 1.0}
        turn = record_response(turn, [assistant(f"{number}.")], **facts)
    short, result = run_immediately(compact_turn(turn, MessageLimitCompactor(4)))
    assert result.changed
    assert short.leading == turn.leading
    assert (short.id, short.data["mine"]) == (turn.id, 1)
    state = get_state(short)
    assert (state.mode, state.previous_response_id) == ("chained", "")
    assert [each.response_id for each in state.anchors] == ["r2"]
    assert plan_request(short, scope="s", now=3.0).reason == "changed"


SUMMARY_ENGINE = FunctionEngine(lambda _: "short")


def compactors() -> st.SearchStrategy[Compactor]:
    """Return a strategy for compactors with small limits."""
    limits = st.integers(1, 60)
    tools = {"keep_exchanges": st.integers(1, 3), "min_saving": st.integers(1, 200)}
    leaves = st.one_of(
        limits.flatmap(
            lambda limit: st.builds(MessageLimitCompactor, st.just(limit), _up_to(limit))
        ),
        st.integers(1, 900).flatmap(
            lambda limit: st.builds(TokenLimitCompactor, st.just(limit), _up_to(limit))
        ),
        st.builds(ToolExchangeCompactor, st.integers(10, 200), **tools),
        st.builds(SummarizingCompactor, st.integers(2, 900), engine=st.just(SUMMARY_ENGINE)),
        limits.map(lambda limit: SplitCompactor(FixedTrigger(), MessageLimitCompactor(limit))),
    )
    return leaves | st.lists(leaves, max_size=3).map(lambda parts: CompositeCompactor(*parts))


def _up_to(limit: int) -> st.SearchStrategy[int]:
    return st.integers(1, limit)


def retained_indexes(before: tuple[Block, ...], after: tuple[Block, ...]) -> list[int]:
    """Return the indexes in the old history of the blocks that are also in the new one."""
    positions = {block.id: index for index, block in enumerate(before)}
    return [positions[block.id] for block in after if block.id in positions]


@given(histories(), compactors())
def test_compaction_preserves_pairs_order_and_blocks(
    blocks: tuple[Block, ...], compactor: Compactor
) -> None:
    """No pair is split, nothing is reordered, and what remains starts at a user block, with the newest exchange."""
    result = compact_now(compactor, blocks)
    assert pairing_problems(result.blocks) <= pairing_problems(blocks)
    positions = retained_indexes(blocks, result.blocks)
    assert positions == sorted(positions)
    modified = {new.id for _, new in result.changes.modified}
    before = {block.id: block for block in blocks}
    for block in result.blocks:
        if block.id in before and block.id not in modified:
            assert block is before[block.id]
    assert not any("failed" in note for note in result.notes)
    if result.removed:
        assert isinstance(result.blocks[0], UserBlock)
        newest = max(i for i, block in enumerate(blocks) if isinstance(block, UserBlock))
        assert result.blocks[-(len(blocks) - newest) :] == blocks[newest:]


@given(histories(), compactors())
def test_compaction_is_idempotent(blocks: tuple[Block, ...], compactor: Compactor) -> None:
    """Compacting an already compacted history changes nothing."""
    first = compact_now(compactor, blocks)
    if not first.notes and not _has_summarizer(compactor):
        second = compact_now(compactor, first.blocks)
        assert second.blocks == first.blocks


def _has_summarizer(compactor: Compactor) -> bool:
    if isinstance(compactor, CompositeCompactor):
        return any(map(_has_summarizer, compactor.compactors))
    return isinstance(compactor, SummarizingCompactor)


@given(histories(), st.integers(1, 30))
def test_a_message_limit_is_met_or_reported(blocks: tuple[Block, ...], maximum: int) -> None:
    """The number of blocks is within the limit, unless the newest exchange alone exceeds it."""
    result = compact_now(MessageLimitCompactor(maximum), blocks)
    assert len(result.blocks) <= maximum or result.notes


@given(histories(), st.integers(1, 600), st.data())
def test_a_token_target_is_met_or_reported(
    blocks: tuple[Block, ...], maximum: int, data: st.DataObject
) -> None:
    """A history above the limit is cut to the target, unless the newest exchange alone exceeds it."""
    target = data.draw(st.integers(1, maximum))
    request = CompactionRequest(blocks)
    result = compact_now(TokenLimitCompactor(maximum, target), blocks)
    if request.size() <= maximum:
        assert result.blocks == blocks
    else:
        assert request.count(result.blocks) <= target or result.notes
        if result.changed:
            assert result.tokens_before == request.size()
            assert result.tokens_after == request.count(result.blocks)
