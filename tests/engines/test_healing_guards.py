"""Guards of healing and recording that nothing else would miss."""

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engines.fake_server import json_response, serve_handler
from kedge.engines.evidence import (
    BASE_COOLDOWN,
    HOLD_SECONDS,
    MAX_COOLDOWN,
    MAX_HOLD_SECONDS,
    ServerEvidence,
)
from kedge.engines.response_reader import record_outcome
from kedge.engines.token_evidence import SentTokens, can_disprove, can_prove, judge_usage
from kedge.errors import RequestRefused
from kedge.events import Outcome, Usage
from kedge.planning import AnchorRecord, TokenCounts, get_state, plan_request
from kedge.providers import connect
from kedge.turns import Turn, assistant, user

MAX_ATTEMPTS = 6
BASE = TokenCounts(input=500, cached=0, output=20, reasoning=0, own_reasoning=0, settings=1)
SENT = SentTokens(lower=10, upper=60, estimate=14, blocks=1, settings=1)


class LosingServer:
    """Creates conversation objects and never finds one of them."""

    def __init__(self) -> None:
        self.attempts = 0

    async def handle(self, request: HttpRequest) -> Response:
        """Create an object, or report that the one of a request is missing."""
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


def test_a_response_with_the_id_of_an_earlier_one_is_no_anchor() -> None:
    """Its blocks stay in the Turn, without a record."""
    turn = Turn([user("Hello")])
    plan = plan_request(turn, scope="s", now=0.0)
    outcome = Outcome("completed", (assistant("Hi"),), "resp_1")
    recorded = record_outcome(
        turn, outcome, plan, now=0.0, stored=True, retention=None, reused=True
    )
    assert len(recorded) == 2
    assert get_state(recorded).anchors == ()


def test_a_count_has_two_bounds_and_three_verdicts() -> None:
    """Above what was sent it proves, below what was held it disproves, between them it says nothing."""
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, 0) == "remembered"
    assert judge_usage(Usage(input_tokens=14), BASE, SENT, 0) == "lost"
    assert judge_usage(Usage(input_tokens=521), BASE, SENT, 0) == "partial"
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, 480) == ""
    assert judge_usage(Usage(input_tokens=534), BASE, SENT, None) == ""
    assert judge_usage(None, BASE, SENT, 0) == ""


def test_changed_settings_give_no_disproof() -> None:
    """Other instructions, tools or a format may make a context smaller."""
    changed = SentTokens(lower=10, upper=60, estimate=14, blocks=1, settings=2)
    assert judge_usage(Usage(input_tokens=14), BASE, changed, 0) == ""


def test_cached_tokens_count_where_they_are_apart() -> None:
    """Disproof must hold with the cached tokens added."""
    assert judge_usage(Usage(input_tokens=14, cached_tokens=520), BASE, SENT, 0) == ""


def test_cached_instructions_do_not_prove_the_context() -> None:
    """A prompt cache also has the instructions and tools, which another conversation may have sent."""
    base = BASE._replace(cached=384)
    assert judge_usage(Usage(input_tokens=390, cached_tokens=384), base, SENT, 380) == "lost"


def test_reasoning_since_the_last_user_message_may_be_dropped() -> None:
    """It was counted for the anchor, and is not part of the next request."""
    thinking = BASE._replace(reasoning=300)
    assert judge_usage(Usage(input_tokens=234), thinking, SENT, 0) == "remembered"


def test_a_request_is_chained_only_where_its_count_would_prove() -> None:
    """The expected count must exceed what the request alone could amount to."""
    anchor = AnchorRecord("r", "s", "d", 2, counted=BASE)
    assert can_prove(anchor, SENT, 400)
    assert not can_prove(anchor, SENT, 480)
    assert not can_prove(AnchorRecord("r", "s", "d", 2), SENT, 0)


def test_a_loss_must_show_in_the_count_of_a_chained_request() -> None:
    """A short context before a long delta would be lost without a trace: the delta is sent in full."""
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
    """And starts again with a minute after a proof."""
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
    """It is saved when it changes, and a chain that grows says nothing new about a proven server."""
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


def test_answers_are_held_back_for_longer_than_a_proof_takes() -> None:
    """A server may remember on one connection and forget on another; losses in a row double the time."""
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


def test_a_server_that_rejects_chaining_is_believed_for_good() -> None:
    """No time changes that."""
    evidence = ServerEvidence()
    evidence.record_unsupported()
    assert evidence.open_doubt(10 * MAX_COOLDOWN) == "unsupported"


def test_evidence_survives_its_json_form() -> None:
    """With its overheads and its learned depth; what is not understood is left out."""
    evidence = ServerEvidence(proof="count", max_depth=7, overheads={5: 12}, matched=40)
    assert ServerEvidence.from_json(evidence.to_json()) == evidence
    assert ServerEvidence.from_json({"proof": 3, "unknown": 1}) == ServerEvidence()
