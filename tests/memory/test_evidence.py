"""Test the transitions of the evidence about a server's memory."""

from kedge.memory.evidence import (
    BASE_COOLDOWN,
    CONTRADICTION_SECONDS,
    HOLD_SECONDS,
    MAX_COOLDOWN,
    MAX_HOLD_SECONDS,
    ServerEvidence,
)


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


def test_a_second_silent_loss_resets_the_verified_depth() -> None:
    """What was verified after the first loss must be verified again after the second one."""
    evidence = ServerEvidence(proof="count")
    evidence.record_silent_loss(0.0, 4, partial=False)
    evidence.record_remembered(3)
    evidence.record_silent_loss(1.0, 2, partial=False)
    evidence.record_remembered(1)
    now = evidence.hold_until
    assert (evidence.must_hold(1, now), evidence.must_hold(2, now)) == (False, True)


def test_hold_time_outlasts_a_proof() -> None:
    """One connection may remember while another forgets, so a proof does not end the hold time."""
    evidence, now = ServerEvidence(proof="count"), 1_000.0
    assert not evidence.must_hold(3, now)
    evidence.record_silent_loss(now, 2, partial=False)
    evidence.record_remembered(3)
    assert evidence.proof
    assert evidence.must_hold(1, now + HOLD_SECONDS - 1)
    assert not evidence.must_hold(3, now + HOLD_SECONDS)
    evidence.record_silent_loss(now + HOLD_SECONDS, 2, partial=False)
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
    evidence.doubt = "unsupported"
    assert evidence.open_doubt(10 * MAX_COOLDOWN) == "unsupported"


def test_evidence_round_trips_through_json() -> None:
    """Overheads and the learned depth are restored; unknown members and invalid evidence are ignored."""
    evidence = ServerEvidence(proof="count", max_depth=7, overheads={5: 12}, matched=40)
    restored = ServerEvidence()
    restored.restore({**evidence.to_json(), "unknown": 1})
    assert restored == evidence
    restored.restore({"proof": 3})
    assert restored == evidence


def test_a_missing_response_of_a_proven_server_concerns_its_own_conversation() -> None:
    """Only if responses of two conversations are missing, in spite of new ones, nothing is chained."""
    evidence = ServerEvidence(proof="count")
    evidence.record_missing(10.0, created_at=5.0, conversation="a")
    assert evidence.open_doubt(11.0, "a") == ""
    evidence.record_missing(20.0, created_at=15.0, conversation="a")
    assert evidence.open_doubt(21.0, "a") == "never_stores"
    assert evidence.open_doubt(21.0, "b") == ""
    assert evidence.proof
    evidence.record_missing(22.0, created_at=21.0, conversation="b")
    assert evidence.open_doubt(23.0, "c") == "never_stores"
    assert not evidence.proof


def test_responses_that_were_lost_together_count_once() -> None:
    """A server that lost its memory once is chained on again at once, in every conversation."""
    evidence = ServerEvidence(proof="count")
    for conversation in "abc":
        evidence.record_missing(10.0, created_at=5.0, conversation=conversation)
    assert [evidence.open_doubt(11.0, each) for each in "abcd"] == [""] * 4


def test_an_unproven_server_without_a_response_is_not_tried_in_any_conversation() -> None:
    """A server that never showed that it remembers is treated as not storing after one rejection."""
    evidence = ServerEvidence()
    evidence.record_missing(10.0, created_at=5.0, conversation="a")
    assert evidence.open_doubt(11.0, "b") == "never_stores"


def test_counts_outweigh_a_probe() -> None:
    """After a loss on a server that lists its items, no probe is believed for a day."""
    evidence = ServerEvidence()
    evidence.record_probe(agrees=True, now=0.0)
    assert (evidence.stores, evidence.proof) == (True, "")
    evidence.record_silent_loss(1.0, 2, partial=False)
    assert not evidence.stores
    assert evidence.next_probe_at == 1.0 + CONTRADICTION_SECONDS


def test_a_failed_probe_is_no_loss() -> None:
    """A server that lists nothing, or other items, may still prove its memory by its counts."""
    evidence = ServerEvidence()
    for agrees in (None, False):
        evidence.record_probe(agrees=agrees, now=0.0)
        assert evidence.open_doubt(0.0) == ""
    assert evidence.next_probe_at == 2 * BASE_COOLDOWN
