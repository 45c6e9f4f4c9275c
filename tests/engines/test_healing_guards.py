"""Test edge cases of healing, of recording responses and of the evidence about a server."""

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engines.fake_server import json_response, serve_handler
from kedge.engines.response_reader import record_outcome
from kedge.errors import RequestRefused
from kedge.events import Outcome, Usage
from kedge.memory.evidence import (
    BASE_COOLDOWN,
    HOLD_SECONDS,
    MAX_COOLDOWN,
    MAX_HOLD_SECONDS,
    ServerEvidence,
)
from kedge.memory.tokens import SentTokens, can_disprove, can_prove, judge_usage
from kedge.planning import AnchorRecord, TokenCounts, get_state, plan_request
from kedge.providers import connect
from kedge.turns import Turn, assistant, user

MAX_ATTEMPTS = 6
BASE = TokenCounts(input=500, cached=0, output=20, reasoning=0, own_reasoning=0, settings=1)
SENT = SentTokens(lower=10, upper=60, estimate=14, blocks=1, settings=1)


class LosingServer:
    """A server that creates conversation objects and never finds one of them."""

    def __init__(self) -> None:
        self.attempts = 0

    async def handle(self, request: HttpRequest) -> Response:
        """Create an object, or report that the object of a request is missing."""
        await request.body()
        if request.url.path.endswith("/conversations"):
            return json_response({"id": f"conv_{self.attempts}"})
        self.attempts += 1
        if self.attempts > MAX_ATTEMPTS:
            return json_response({"error": {"message": "stop"}}, 418)
        message = f"Conversation with id 'conv_{self.attempts}' not found."
        return json_response({"error": {"message": message}}, 404)


async def test_a_reason_is_healed_once_and_then_raised() -> None:
    """A server that fails in the same way again does not get a third request."""
    server = LosingServer()
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", mode="conversation", max_retries=0) as engine:
            with pytest.raises(RequestRefused, match="not found"):
                await engine.run(Turn([user("Hello")]))
    assert server.attempts == 2


def test_response_with_a_reused_id_is_no_anchor() -> None:
    """The blocks of the response stay in the Turn, without an anchor record."""
    turn = Turn([user("Hello")])
    plan = plan_request(turn, scope="s", now=0.0)
    outcome = Outcome("completed", (assistant("Hi"),), "resp_1")
    recorded = record_outcome(
        turn, outcome, plan, now=0.0, stored=True, retention=None, reused=True
    )
    assert len(recorded) == 2
    assert get_state(recorded).anchors == ()


def test_token_count_proves_disproves_or_neither() -> None:
    """Above what was sent a count proves, below the stored context it disproves, otherwise neither."""
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, 0) == "remembered"
    assert judge_usage(Usage(input_tokens=14), BASE, SENT, 0) == "lost"
    assert judge_usage(Usage(input_tokens=521), BASE, SENT, 0) == "partial"
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, 480) == ""
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, None) == ""
    assert judge_usage(None, BASE, SENT, 0) == ""


def test_changed_settings_give_no_disproof() -> None:
    """Changed instructions, tools or formats may make a context smaller, so a low count proves nothing."""
    changed = SentTokens(lower=10, upper=60, estimate=14, blocks=1, settings=2)
    assert judge_usage(Usage(input_tokens=14), BASE, changed, 0) == ""


def test_separately_counted_cached_tokens_are_added() -> None:
    """A disproof must also hold with the cached tokens added to the input tokens."""
    assert judge_usage(Usage(input_tokens=14, cached_tokens=520), BASE, SENT, 0) == ""


def test_cached_instructions_do_not_prove_the_context() -> None:
    """A prompt cache also has instructions and tools, which another conversation may have sent."""
    base = BASE._replace(cached=384)
    assert judge_usage(Usage(input_tokens=390, cached_tokens=384), base, SENT, 380) == "lost"


def test_reasoning_since_the_last_user_message_may_be_dropped() -> None:
    """Reasoning tokens counted for the anchor may be missing from the next request."""
    thinking = BASE._replace(reasoning=300)
    assert judge_usage(Usage(input_tokens=234), thinking, SENT, 0) == "remembered"


def test_can_prove_requires_a_distinguishable_count() -> None:
    """The expected count must exceed the maximum count of the request alone."""
    anchor = AnchorRecord("r", "s", "d", 2, counted=BASE)
    assert can_prove(anchor, SENT, 400)
    assert not can_prove(anchor, SENT, 480)
    assert not can_prove(AnchorRecord("r", "s", "d", 2), SENT, 0)


def test_can_disprove_requires_a_visible_loss() -> None:
    """Losing a short context before a long delta would not be visible, so everything is sent."""
    short = BASE._replace(input=10, output=17)
    anchor, long_one = AnchorRecord("r", "s", "d", 2, counted=BASE), SENT
    assert can_disprove(anchor, long_one, 400, exact=False)
    assert not can_disprove(anchor, long_one, 470, exact=False)
    assert can_disprove(anchor, long_one, 470, exact=True)
    many = SentTokens(lower=415, upper=2_400, estimate=455, blocks=20, settings=1)
    assert can_disprove(anchor, many, 3, exact=True)
    assert not can_disprove(anchor, many, 3, exact=False)
    assert not can_disprove(AnchorRecord("r", "s", "d", 2, counted=short), many, 3, exact=True)
    assert not can_disprove(anchor, many, None, exact=True)
    assert not can_disprove(AnchorRecord("r", "s", "d", 2), many, 3, exact=True)


def test_the_delay_after_a_loss_doubles_up_to_an_hour() -> None:
    """The delay doubles with each loss and is reset to a minute after a proof."""
    evidence, now = ServerEvidence(), 0.0
    delays: list[float] = []
    for _ in range(8):
        evidence.record_loss(now)
        delays.append(evidence.retry_at - now)
        assert evidence.open_doubt(now) == "forgot"
        now = evidence.retry_at
        assert evidence.open_doubt(now) == ""
    assert delays == [BASE_COOLDOWN * 2**n for n in range(6)] + [MAX_COOLDOWN] * 2
    evidence.record_remembered(1)
    evidence.record_loss(now)
    assert evidence.retry_at - now == BASE_COOLDOWN


def test_evidence_does_not_change_with_every_response() -> None:
    """Evidence is saved when it changes, and a growing chain on a proven server changes nothing."""
    evidence = ServerEvidence(proof="count")
    before = evidence.to_json()
    for depth in range(1, 5):
        evidence.record_remembered(depth)
    assert evidence.to_json() == before
    evidence.record_silent_loss(0.0, 3, partial=False)
    evidence.record_remembered(2)
    now = evidence.hold_until
    assert (evidence.must_hold(2, now), evidence.must_hold(3, now)) == (False, True)
    evidence.record_remembered(3)
    assert not evidence.must_hold(4, now)


def test_hold_time_outlasts_a_proof() -> None:
    """One connection may remember while another forgets, so a proof does not end the hold time."""
    evidence, now = ServerEvidence(proof="count"), 1_000.0
    assert not evidence.must_hold(3, now)
    evidence.record_silent_loss(now, 2, partial=False)
    evidence.record_remembered(3)
    assert evidence.is_proven
    assert evidence.must_hold(1, now + HOLD_SECONDS - 1)
    assert not evidence.must_hold(3, now + HOLD_SECONDS)
    evidence.record_audit(agrees=False, now=now + HOLD_SECONDS)
    assert evidence.hold_until == now + 3 * HOLD_SECONDS
    for _ in range(20):
        evidence.record_silent_loss(now, 2, partial=True)
    assert evidence.hold_until == now + MAX_HOLD_SECONDS
    now += 3 * MAX_HOLD_SECONDS
    evidence.record_silent_loss(now, 2, partial=True)
    assert evidence.hold_until == now + HOLD_SECONDS


def test_rejected_chaining_is_permanent() -> None:
    """A server that rejects chaining is never tried again."""
    evidence = ServerEvidence()
    evidence.record_unsupported()
    assert evidence.open_doubt(10 * MAX_COOLDOWN) == "unsupported"


def test_evidence_round_trips_through_json() -> None:
    """Overheads and the learned depth are restored, and unknown members are ignored."""
    evidence = ServerEvidence(proof="count", max_depth=7, overheads={5: 12}, matched=40)
    assert ServerEvidence.from_json(evidence.to_json()) == evidence
    assert ServerEvidence.from_json({"proof": 3, "unknown": 1}) == ServerEvidence()
