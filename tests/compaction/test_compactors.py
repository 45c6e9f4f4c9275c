"""Each compactor for itself: when it acts, what it keeps, what it says."""

import logging
from typing import Any

import pytest

from compaction.histories import FunctionEngine, make_exchanges, run_immediately
from kedge.chat import Chat
from kedge.compaction import (
    AllTriggers,
    AnyTrigger,
    CompactionRequest,
    CompactionResult,
    CompositeCompactor,
    MessageLimitCompactor,
    ProviderCounter,
    Replacement,
    ServerCompactor,
    SplitCompactor,
    SummarisingCompactor,
    SummarizingCompactor,
    TokenLimitCompactor,
    advance_to_first_user_message,
    compact_turn,
    cut_points,
    is_summary,
    run_compactor,
)
from kedge.errors import InvalidSetting
from kedge.events import Usage
from kedge.middleware import compact
from kedge.planning import (
    ConversationState,
    get_state,
    plan_request,
    record_response,
    set_state,
)
from kedge.turns import Block, Turn, UserBlock, assistant, system, tool_call, tool_result, user


class FixedTrigger:
    """A trigger that says what it is told to, and counts how often it was asked."""

    def __init__(self, verdict: bool) -> None:
        self.verdict = verdict
        self.call_count = 0

    def should_compact(self, request: CompactionRequest) -> bool:
        """The verdict."""
        self.call_count += 1
        return self.verdict


class AsyncTrigger(FixedTrigger):
    """The same, but one has to wait for it."""

    async def should_compact(self, request: CompactionRequest) -> bool:  # type: ignore[override]
        """The verdict."""
        return super().should_compact(request)


class Newest:
    """A strategy of one line: the newest exchange."""

    def compact_blocks(self, request: CompactionRequest) -> tuple[Block, ...]:
        """The last two blocks."""
        return request.blocks[-2:]


def compact_now(compactor: Any, blocks: tuple[Block, ...], **more: Any) -> CompactionResult:
    """Run a compactor over blocks."""
    return run_immediately(run_compactor(compactor, CompactionRequest(blocks, **more)))


def test_a_message_limit_keeps_the_last_messages() -> None:
    """At the limit nothing happens; above it the newest stay, from a user block on."""
    assert not compact_now(MessageLimitCompactor(4), make_exchanges(2)).changed
    result = compact_now(MessageLimitCompactor(4), make_exchanges(3))
    assert result.blocks == make_exchanges(3)[2:]
    assert [block.kind for block in result.removed] == ["user", "assistant"]


def test_a_target_below_the_limit_keeps_compaction_rare() -> None:
    """Hysteresis: after a cut there is room until the limit is reached again."""
    compactor = MessageLimitCompactor(10, target_messages=4)
    blocks, cuts = make_exchanges(1), 0
    for number in range(30):
        result = compact_now(compactor, blocks)
        cuts += result.changed
        blocks = (*result.blocks, user(f"{number}?"), assistant(f"{number}."))
    assert 5 <= cuts <= 10


def test_the_newest_exchange_remains_at_any_length() -> None:
    """It is whole, and a note says that the limit is not met."""
    calls = [tool_call("f", "{}", call_id=f"c{n}") for n in range(5)]
    results = [tool_result(f"c{n}", "yes") for n in range(5)]
    blocks = (*make_exchanges(1), user("do!"), *calls, *results, assistant("done"))
    for compactor in (MessageLimitCompactor(3), TokenLimitCompactor(10)):
        result = compact_now(compactor, blocks)
        assert result.blocks == blocks[2:]
        assert result.notes == ("the newest exchange alone exceeds the limit; it remains complete",)


def test_a_token_limit_cuts_to_its_target() -> None:
    """By default three quarters of the limit."""
    compactor = TokenLimitCompactor(200)
    assert compactor.target_tokens == 150
    request = CompactionRequest(make_exchanges(20))
    result = run_immediately(run_compactor(compactor, request))
    assert request.count(result.blocks) <= 150
    assert result.tokens_before == request.count(request.blocks)
    assert result.tokens_after == request.count(result.blocks)


def test_the_value_of_the_server_wins_if_present() -> None:
    """Tools and instructions are in its count, and are still there after a cut."""
    blocks, usage = (
        make_exchanges(20),
        Usage(input_tokens=5_000, output_tokens=100, reasoning_tokens=50),
    )
    counted = CompactionRequest(blocks).count(blocks)
    assert not compact_now(TokenLimitCompactor(6_000), blocks, usage=usage).changed
    result = compact_now(TokenLimitCompactor(5_000, 4_900), blocks, usage=usage)
    assert result.tokens_before == 5_050
    assert result.tokens_after is not None
    assert result.tokens_after <= 4_900
    assert CompactionRequest(blocks).count(result.blocks) <= counted - 150


def test_leading_system_blocks_count_and_stay() -> None:
    """They take room in every request, and are never compacted."""
    lead = (system("Be kind. " * 60),)
    request = CompactionRequest(make_exchanges(5), lead)
    result = run_immediately(run_compactor(TokenLimitCompactor(300, 250), request))
    assert result.changed
    assert request.count(lead) + request.count(result.blocks) <= 250


def test_without_a_counting_provider_the_counter_counts() -> None:
    """A provider counter is no worse than none."""
    blocks = make_exchanges(20)
    counted = compact_now(TokenLimitCompactor(200), blocks)
    requested = compact_now(TokenLimitCompactor(200, counter=ProviderCounter()), blocks)
    assert requested.blocks == counted.blocks


def test_another_counter_can_be_given() -> None:
    """Whoever knows a model better counts for it."""

    class Characters:
        def count_text(self, text: str) -> int:
            return len(text)

        def count_items(self, items: Any) -> int:
            return sum(len(str(item)) for item in items)

    result = compact_now(TokenLimitCompactor(1_000, counter=Characters()), make_exchanges(20))
    assert 2 <= len(result.blocks) < 20


def test_composite_compactors_work_in_order() -> None:
    """Each sees what the one before has left, and the result is told as one."""
    result = compact_now(
        CompositeCompactor(MessageLimitCompactor(8), MessageLimitCompactor(6, 4)), make_exchanges(6)
    )
    assert len(result.blocks) == 4
    assert result.by == "MessageLimitCompactor, MessageLimitCompactor"
    assert len(result.removed) == 8
    assert result.tokens_before == CompactionRequest(make_exchanges(6)).size()
    assert result.tokens_after == CompactionRequest(result.blocks).size()
    assert not compact_now(CompositeCompactor(), make_exchanges(3)).changed


def test_a_composite_passes_over_what_fails() -> None:
    """The next one still has its turn, and the note stays."""

    class Broken:
        async def compact(self, request: CompactionRequest) -> CompactionResult:
            raise ZeroDivisionError

    result = compact_now(CompositeCompactor(Broken(), MessageLimitCompactor(2)), make_exchanges(3))
    assert len(result.blocks) == 2
    assert result.notes == ("Broken failed (ZeroDivisionError); nothing was changed",)


def test_any_trigger_works_with_any_strategy() -> None:
    """Plain or async methods; a strategy may return bare blocks."""
    assert not compact_now(SplitCompactor(FixedTrigger(False), Newest()), make_exchanges(3)).changed
    for trigger in (FixedTrigger(True), AsyncTrigger(True)):
        result = compact_now(SplitCompactor(trigger, Newest()), make_exchanges(3))
        assert result.blocks == make_exchanges(3)[-2:]
        assert result.by == f"{type(trigger).__name__}+Newest"


def test_limit_compactors_serve_as_trigger_and_as_strategy() -> None:
    """When is one's business, how the other's."""
    compactor = SplitCompactor(MessageLimitCompactor(10), TokenLimitCompactor(100, 60))
    assert not compact_now(compactor, make_exchanges(5)).changed
    request = CompactionRequest(make_exchanges(6))
    assert request.count(run_immediately(run_compactor(compactor, request)).blocks) <= 60


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_triggers_are_put_together(one: bool, other: bool) -> None:
    """Any is or, all is and; the second is asked only if it matters."""
    request = CompactionRequest(())
    second = AsyncTrigger(other)
    assert run_immediately(AnyTrigger(FixedTrigger(one), second).should_compact(request)) is (
        one or other
    )
    assert second.call_count == (0 if one else 1)
    second = AsyncTrigger(other)
    assert run_immediately(AllTriggers(FixedTrigger(one), second).should_compact(request)) is (
        one and other
    )
    assert second.call_count == (1 if one else 0)


def test_no_triggers_never_trigger() -> None:
    """All of nothing is nothing."""
    assert not run_immediately(AllTriggers().should_compact(CompactionRequest(())))
    assert not run_immediately(AnyTrigger().should_compact(CompactionRequest(())))


def test_a_summary_takes_the_place_of_the_old_part() -> None:
    """The newest part stays word for word, and the summary is marked for model and people."""
    oracle = FunctionEngine(lambda _: "They counted to ten.")
    result = compact_now(SummarisingCompactor(200, 60, engine=oracle), make_exchanges(20))
    summary, *newest = result.blocks
    assert isinstance(summary, UserBlock)
    assert is_summary(summary)
    assert summary.text == "[Summary of the conversation so far]\nThey counted to ten."
    assert summary.origin == "SummarisingCompactor"
    assert tuple(newest) == make_exchanges(20)[-len(newest) :]
    assert summary.metadata["summary"] == 40 - len(newest)
    assert result.usage == Usage(10, 0, 5, 0, 15)
    assert oracle.turns[0].blocks[:-1] == make_exchanges(20)[: 40 - len(newest)]


def test_an_earlier_summary_is_folded_into_the_new_one() -> None:
    """The model is shown it, and the new one counts all that both stand for."""
    oracle = FunctionEngine(lambda turn: f"of {len(turn)} blocks")
    compactor = SummarisingCompactor(200, 60, engine=oracle)
    first = compact_now(compactor, make_exchanges(20))
    second = compact_now(compactor, (*first.blocks, *make_exchanges(10)))
    assert oracle.turns[1].blocks[0] == first.blocks[0]
    assert [is_summary(block) for block in second.blocks].count(True) == 1
    retained = len(second.blocks) - 1
    assert second.blocks[0].metadata["summary"] == 60 - retained


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ("fail", "the summary call failed (ServerFailed); nothing was cut"),
        ("", "the summary is empty or no shorter than what it summarizes; nothing was cut"),
    ],
)
def test_a_summary_that_does_not_help_is_not_used(answer: str, note: str) -> None:
    """A failed or empty summary leaves the history as it is."""
    result = compact_now(
        SummarisingCompactor(200, 60, engine=FunctionEngine(lambda _: answer)), make_exchanges(20)
    )
    assert not result.changed
    assert result.notes == (note,)


def test_a_verbose_model_does_not_cause_compaction_at_every_turn() -> None:
    """Its summary is cut, so there is room for several exchanges before the next one."""
    oracle = FunctionEngine(lambda _: "x " * 5_000)
    compactor = SummarisingCompactor(400, 100, engine=oracle)
    result = compact_now(compactor, make_exchanges(40))
    request = CompactionRequest(result.blocks)
    assert request.count(result.blocks[:1]) <= compactor.max_summary_tokens == 150
    assert result.notes[0].startswith("the summary had ")
    following = CompactionRequest((*result.blocks, *make_exchanges(4)))
    assert not compactor.should_compact(following)


def test_the_length_of_summaries_can_be_set() -> None:
    """Up to the maximum of the conversation."""
    assert SummarizingCompactor(400, max_summary_tokens=50).max_summary_tokens == 50
    with pytest.raises(InvalidSetting, match="max_summary_tokens"):
        SummarizingCompactor(400, max_summary_tokens=500)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (CompositeCompactor, [[MessageLimitCompactor(2)]], "which list has not"),
        (CompositeCompactor, [MessageLimitCompactor], "not the class MessageLimit"),
        (CompositeCompactor, [FixedTrigger(True)], r"compact\(request\), which FixedTrigger"),
        (SplitCompactor, [Newest(), FixedTrigger(True)], "which Newest has not"),
        (SplitCompactor, [FixedTrigger(True), FixedTrigger(True)], "compact_blocks"),
        (SplitCompactor, [FixedTrigger, Newest()], "not the class FixedTrigger"),
        (AnyTrigger, [[FixedTrigger(True)]], "which list has not"),
        (AllTriggers, [Newest()], "which Newest has not"),
        (compact, [Newest()], "which Newest has not"),
    ],
)
def test_what_is_composed_wrongly_is_rejected(make: Any, given: list[Any], message: str) -> None:
    """On construction: it would fail at every compaction, and only the log would show it."""
    with pytest.raises(InvalidSetting, match=message):
        make(*given)


@pytest.mark.parametrize("compactor", [MessageLimitCompactor, [MessageLimitCompactor(2)]])
def test_a_chat_rejects_what_is_no_compactor(compactor: Any) -> None:
    """When it is made, not at its first compaction."""
    with pytest.raises(InvalidSetting, match="compactor must"):
        Chat("practice", compactor=compactor)


def test_without_an_engine_nothing_is_summed_up() -> None:
    """There is nobody to ask, and that is said."""
    result = compact_now(SummarisingCompactor(200, 60), make_exchanges(20))
    assert result.notes == ("the summary call failed (KedgeError); nothing was cut",)


def test_one_long_exchange_is_not_summed_up() -> None:
    """There is nothing old in it; a summary alone is not summed up again either."""
    oracle = FunctionEngine(lambda _: "short")
    blocks = (user("x " * 500), assistant("y"))
    result = compact_now(SummarisingCompactor(100, 50, engine=oracle), blocks)
    assert result.notes == ("there is nothing old enough to summarize",)
    assert oracle.turns == []


def test_a_cheaper_model_can_be_named() -> None:
    """The same engine, another model."""
    oracle = FunctionEngine(lambda _: "short")
    compact_now(SummarisingCompactor(200, 60, engine=oracle, model="small"), make_exchanges(20))
    assert oracle.requests[0].model == "small"


def test_a_conversation_object_is_not_asked_for_a_summary() -> None:
    """In conversation mode the question would become part of the conversation."""

    class InObjects(FunctionEngine):
        def plan(self, turn: Turn, **options: Any) -> Any:
            mode = options.get("mode", "conversation")
            return plan_request(turn, scope="oracle", mode=mode, now=0.0)

    oracle = InObjects(lambda _: "short")
    compact_now(SummarisingCompactor(200, 60, engine=oracle), make_exchanges(20))
    assert oracle.requests[0].mode == "chained"


def test_a_provider_that_does_not_compact_is_not_asked() -> None:
    """The note says so, and nothing changes."""
    result = compact_now(
        ServerCompactor(100, "endpoint"), make_exchanges(20), engine=FunctionEngine(lambda _: "")
    )
    assert result.notes == ("this engine's provider does not compact",)
    assert not compact_now(ServerCompactor(1_000), make_exchanges(20)).changed


def test_cuts_fall_on_user_blocks_between_which_everything_is_answered() -> None:
    """An event in the middle of a call is no place to cut, nor is anything behind an open call."""
    blocks = (
        user("a"),
        tool_call("f", "{}", call_id="c1"),
        user("an event"),
        tool_result("c1", "yes"),
        assistant("b"),
        user("c"),
        tool_call("f", "{}", call_id="c2"),
        user("d"),
    )
    assert cut_points(blocks) == [0, 5]


def test_a_history_can_be_advanced_to_its_first_user_message() -> None:
    """For compactors of one's own."""
    blocks = (assistant("x"), user("a"), assistant("b"), user("c"))
    assert advance_to_first_user_message(blocks) == blocks[1:]
    assert advance_to_first_user_message(blocks, 2) == blocks[3:]
    assert advance_to_first_user_message(blocks[:1]) == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda: MessageLimitCompactor(0),
        lambda: MessageLimitCompactor(4, 5),
        lambda: MessageLimitCompactor(True),
        lambda: TokenLimitCompactor(-1),
        lambda: TokenLimitCompactor(10, 20),
        lambda: SummarisingCompactor(10, 20),
        lambda: ServerCompactor(0),
    ],
)
def test_limits_that_cannot_be_are_refused(make: Any) -> None:
    """When the compactor is made, not when it is too late."""
    with pytest.raises(InvalidSetting):
        make()


INVALID_STRATEGIES: list[Any] = [
    lambda blocks: blocks[3:],  # begins with a result
    lambda _: (),
    lambda blocks: (system("summary"), *blocks[-1:]),
    lambda blocks: (*blocks, blocks[0]),
    lambda _: ("no block",),
    lambda _: None,
]


@pytest.mark.parametrize("make", INVALID_STRATEGIES)
def test_a_strategy_that_breaks_the_history_is_not_followed(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No pair is split, nothing is empty, no system block gets to the front: whoever tries."""

    class Bad:
        def compact_blocks(self, request: CompactionRequest) -> Any:
            return make(request.blocks)

    call = (user("a"), tool_call("f", "{}", call_id="c"), assistant("x"), tool_result("c", "y"))
    with caplog.at_level(logging.WARNING, "kedge.compaction"):
        result = compact_now(SplitCompactor(FixedTrigger(True), Bad()), call)
    assert result.blocks == call
    assert "failed" in result.notes[0]
    assert len(caplog.records) == 1


def test_a_turn_keeps_the_anchors_that_still_hold() -> None:
    """After a cut none does; after a change further back those before it do."""
    turn = Turn([system("Be kind.")], data={"mine": 1})
    for number in range(3):
        turn = turn.append(user(f"{number}?"))
        plan = plan_request(turn, scope="s", now=float(number))
        turn = record_response(
            turn, [assistant(f"{number}.")], response_id=f"r{number}", plan=plan, created_at=1.0
        )
    short, result = run_immediately(compact_turn(turn, MessageLimitCompactor(4)))
    assert result.changed
    assert short.leading == turn.leading
    assert (short.id, short.data["mine"]) == (turn.id, 1)
    assert get_state(short) == ConversationState()

    class Shout:
        def compact_blocks(self, request: CompactionRequest) -> Replacement:
            last = request.blocks[-1]
            return Replacement((*request.blocks[:-1], assistant("LAST", id=last.id)))

    changed, result = run_immediately(
        compact_turn(turn, SplitCompactor(FixedTrigger(True), Shout()))
    )
    assert [record.response_id for record in get_state(changed).anchors] == ["r0", "r1"]
    assert [(old.id, new.id) for old, new in result.changes.modified] == [
        (turn.blocks[-1].id, turn.blocks[-1].id)
    ]
    unchanged, _ = run_immediately(compact_turn(turn, MessageLimitCompactor(100)))
    assert unchanged is turn


def test_a_turn_without_state_can_be_compacted() -> None:
    """Anchors are welcome, not required."""
    turn = set_state(Turn(make_exchanges(4)), ConversationState(mode="stateless"))
    short, _ = run_immediately(compact_turn(turn, MessageLimitCompactor(2)))
    assert get_state(short).mode == "stateless"
    assert len(short) == 2


def test_a_result_has_a_readable_form() -> None:
    """One line for a log, without content."""
    received = str(compact_now(MessageLimitCompactor(2), make_exchanges(3)))
    assert received.startswith("compacted by MessageLimitCompactor: -4 +0 ~0 blocks, ")
    assert "question" not in received
    assert str(compact_now(MessageLimitCompactor(20), make_exchanges(3))) == "not compacted"
