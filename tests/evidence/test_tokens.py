"""Test the token accounting: what a count proves, and the bounds it is compared with."""

from msgspec import structs

from for_each import for_each
from kedge.events import Outcome, Usage
from kedge.evidence.tokens import (
    UNBOUNDED,
    SentTokens,
    can_disprove,
    can_prove,
    count_response,
    has_foreign_tokens,
    judge_usage,
    lacks_context,
    measure_request,
)
from kedge.planning import TokenCounts, plan_request, record_response
from kedge.turns import (
    AssistantBlock,
    Block,
    Turn,
    assistant,
    image,
    reasoning,
    tool_call,
    tool_result,
    user,
)
from kedge.usage.tokens import count_text

BASE = TokenCounts(input=500, cached=0, output=20, reasoning=0, own_reasoning=0, settings=1)
SENT = SentTokens(words=8, tokens=10, size=36, texts=1, settings=1, overhead=0)
"""A text of 10 to 60 tokens; 14 by our count."""
PICTURE = "data:image/png;base64,AAAA"
HISTORY = "A message of the history, with a few more words than are needed. " * 3


def test_a_count_above_all_bounds_shows_foreign_items() -> None:
    """A conversation object with more than the last context, its answer and the request has other items."""
    added = SENT._replace(tokens=26, size=102, texts=2)
    most = BASE.input + added.upper
    assert not has_foreign_tokens(Usage(input_tokens=most), BASE, added)
    assert has_foreign_tokens(Usage(input_tokens=most + 1), BASE, added)
    exact = added._replace(is_exact=True)
    assert not has_foreign_tokens(Usage(input_tokens=540), BASE, exact)
    assert has_foreign_tokens(Usage(input_tokens=541), BASE, exact)


def test_a_count_shows_no_foreign_items_where_it_cannot_be_compared() -> None:
    """Reasoning, other settings, images and cached tokens that are counted apart give no verdict."""
    usage, added = Usage(input_tokens=100_000), SENT._replace(is_exact=True)
    for base in (structs.replace(BASE, own_reasoning=5), structs.replace(BASE, settings=2)):
        assert not has_foreign_tokens(usage, base, added)
    assert not has_foreign_tokens(usage, BASE, added._replace(size=UNBOUNDED))
    apart = structs.replace(BASE, input=20, cached=480)
    assert not has_foreign_tokens(Usage(input_tokens=510), apart, added)
    assert not has_foreign_tokens(usage, BASE, None)


KNOWN = SENT._replace(adds_cached=False)


@for_each(
    ("usage", "base", "sent", "verdict"),
    [
        (Usage(534), BASE, SENT, "remembered"),
        (Usage(14), BASE, SENT, "lost"),
        (Usage(521), BASE, SENT, "partial"),
        (Usage(534), BASE, SENT._replace(overhead=480), ""),
        (Usage(534), BASE, SENT._replace(overhead=None), ""),
        (None, BASE, SENT, ""),
        # Changed instructions, tools or formats may make a context smaller.
        (Usage(14), BASE, SENT._replace(settings=2), ""),
        # A disproof must also hold with the cached tokens added to the input tokens.
        (Usage(14, 520), BASE, SENT, ""),
        (Usage(450, 200), BASE, SENT, "remembered"),
        # Known servers count them as input, unless there are more cached than other tokens.
        (Usage(450, 200), BASE, KNOWN, "partial"),
        (Usage(14, 520), BASE, KNOWN, ""),
        # A prompt cache also has instructions and tools, which another conversation may have sent.
        (Usage(390, 384), structs.replace(BASE, cached=384), SENT._replace(overhead=380), "lost"),
        # Reasoning since the last user message may be dropped.
        (Usage(234), structs.replace(BASE, reasoning=300), SENT, "remembered"),
    ],
)
def test_token_count_proves_disproves_or_neither(
    usage: Usage | None, base: TokenCounts, sent: SentTokens, verdict: str
) -> None:
    """Above what was sent a count proves, below the stored context it disproves, otherwise neither."""
    assert judge_usage(usage, base, sent) == verdict


def test_can_prove_requires_a_distinguishable_count() -> None:
    """The expected count must exceed the maximum count of the request alone."""
    assert can_prove(BASE, SENT._replace(overhead=400))
    assert not can_prove(BASE, SENT._replace(overhead=480))
    assert not can_prove(None, SENT)
    assert not can_prove(BASE, None)


def test_can_disprove_requires_a_visible_loss() -> None:
    """Losing a short context before a long delta would not be visible, so everything is sent."""
    short = structs.replace(BASE, input=10, output=17)
    assert can_disprove(BASE, SENT._replace(overhead=400))
    assert not can_disprove(BASE, SENT._replace(overhead=470))
    assert can_disprove(BASE, SENT._replace(overhead=470, is_exact=True))
    many = SentTokens(375, 375, 1_920, 20, settings=1, overhead=3, is_exact=True)
    assert can_disprove(BASE, many)
    assert not can_disprove(BASE, many._replace(is_exact=False))
    assert not can_disprove(short, many)
    assert not can_disprove(BASE, many._replace(overhead=None))
    assert not can_disprove(None, many)
    assert not can_disprove(BASE, None)


def test_impossible_counts_are_not_compared() -> None:
    """A server that reports fewer output tokens than the text has does not count what it sends."""
    plan = plan_request(Turn([user("The secret key is sesame")]), scope="s", now=0.0)
    answer = assistant("Open sesame! What would you like to unlock?")
    outcome = Outcome("completed", (answer,), "resp_1", usage=Usage(10, output_tokens=1))
    for crude in (True, False):
        sent = measure_request(plan.delta, {"model": "m"}, crude=crude)
        assert count_response(outcome, plan, sent) is None


@for_each(
    ("usage", "lacks"), [(Usage(5), True), (Usage(60), False), (Usage(0), False), (None, False)]
)
def test_fewer_tokens_than_the_texts_have_show_a_lost_context(
    usage: Usage | None, lacks: bool
) -> None:
    """A count below that of any tokenizer is a loss; a server that reports nothing, or 0, does not count."""
    plan = plan_request(Turn([user(HISTORY)]), scope="s", now=0.0)
    assert lacks_context(usage, plan) is lacks


def count_answer(answer: AssistantBlock, usage: Usage, *, crude: bool = False) -> TokenCounts:
    """Return the counts for an answer to a full send."""
    plan = plan_request(Turn([user("Hello")]), scope="s", now=0.0)
    outcome = Outcome("completed", (answer,), "resp_1", usage=usage)
    sent = measure_request(plan.delta, {"model": "m"}, crude=crude)
    counted = count_response(outcome, plan, sent)
    assert counted is not None
    return counted


def test_reported_output_is_no_lower_bound() -> None:
    """The lower bound of an answer is our count of its visible text, whatever the server reports."""
    answer = assistant("You are welcome. " * 20)
    for crude in (True, False):
        low, high = (
            count_answer(answer, Usage(20, output_tokens=tokens), crude=crude)
            for tokens in (100, 1_000)
        )
        assert low.output == high.output < 100


def test_thinking_in_the_text_is_not_carried_over() -> None:
    """Chat templates drop the text before ``</think>`` from earlier answers."""
    thought = assistant("<think>" + "Let me see. " * 50 + "</think>Yes.")
    counted = count_answer(thought, Usage(20, output_tokens=200))
    assert counted.output == count_answer(assistant("Yes."), Usage(20, output_tokens=200)).output
    assert counted.own_reasoning


def test_replayed_reasoning_is_counted_by_the_visible_text() -> None:
    """Reasoning has at least 0 tokens and no upper bound, whatever the server reports for it."""
    thought = reasoning(encrypted_content="secret")
    turn = Turn([user(HISTORY), thought, assistant(HISTORY), user("And?")])
    plan = plan_request(turn, scope="s", now=0.0)
    visible = measure_request(plan.sent, {"model": "m"})
    sent = measure_request(plan.delta, {"model": "m"})
    assert visible
    assert sent
    assert (sent.lower, sent.size) == (visible.lower, UNBOUNDED)
    outcome = Outcome("completed", (assistant("Yes."),), "resp_1", usage=Usage(900))
    counted = count_response(outcome, plan, sent)
    assert counted
    assert counted.reasoning == 900 - sent.lower
    sent = sent._replace(overhead=0)
    assert judge_usage(Usage(900), structs.replace(BASE, settings=sent.settings), sent) == ""


@for_each(("block", "is_carried"), [(tool_result("call_1", "5"), True), (user("And?"), False)])
def test_reasoning_is_carried_over_a_tool_round(block: Block, is_carried: bool) -> None:
    """Reasoning before a tool result is still in the context; a user message may have removed it."""
    turn = Turn([user(HISTORY), tool_call("add", {"a": 2}, call_id="call_1")])
    settings = measure_request([], {"model": "m"})
    assert settings
    counted = structs.replace(BASE, own_reasoning=70, settings=settings.settings)
    full = plan_request(turn.take(1), scope="s", now=0.0)
    turn = record_response(
        turn.take(1), turn[1:], response_id="resp_1", plan=full, counted=counted, created_at=0.0
    )
    plan = plan_request(turn.append(block), scope="s", now=0.0)
    assert plan.anchor
    sent = measure_request(plan.delta, {"model": "m"})
    outcome = Outcome("completed", (assistant("Yes."),), "resp_2", usage=Usage(900))
    found = count_response(outcome, plan, sent)
    assert found
    assert bool(found.reasoning) == is_carried


def test_images_have_no_upper_bound_and_stay_in_the_context() -> None:
    """A request with an image proves nothing, and its count is the base of the next one as it is."""
    plan = plan_request(Turn([user([HISTORY, image(PICTURE)])]), scope="s", now=0.0)
    sent = measure_request(plan.delta, {"model": "m"})
    assert sent
    assert sent.size == UNBOUNDED
    outcome = Outcome("completed", (assistant("Yes."),), "resp_1", usage=Usage(900))
    counted = count_response(outcome, plan, sent)
    assert counted
    assert (counted.input, counted.reasoning) == (900, 0)


def test_only_a_request_that_offers_hosted_tools_is_excluded() -> None:
    """Calls of hosted tools in the history are no obstacle; tools that are offered may add rounds."""
    plan = plan_request(Turn([user(HISTORY)]), scope="s", now=0.0)
    assert measure_request(plan.delta, {"model": "m", "tools": [{"type": "function"}]})
    assert measure_request(plan.delta, {"model": "m", "tools": [{"type": "web_search"}]}) is None


@for_each("text", ["1. Sail.)\n2. Row.)\n3. Haul.)", "\n\n 1. Sail.)\n2. Row.)\n\n "])
def test_lower_bound_holds_for_any_treatment_of_whitespace(text: str) -> None:
    """A server may count a text as it is, without whitespace at its ends, or with single spaces."""
    sent = measure_request([user(text)], {})
    assert sent
    counts = [count_text(each) for each in (text, text.strip(), " ".join(text.split()))]
    assert sent.words == min(counts)
    assert sent.tokens == counts[0]
