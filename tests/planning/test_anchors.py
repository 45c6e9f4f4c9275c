"""Anchor records: matching a prefix of the Turn, expiry, and reasons for rejection."""

import json
from typing import get_args

import pytest

from for_each import for_each
from kedge.planning import (
    REASONS,
    AnchorRecord,
    Reason,
    RejectedAnchor,
    TokenCounts,
    covered_count,
    prefix_digest,
)
from kedge.planning.anchors import (
    decode_token_counts,
    has_hidden_context,
    is_expired,
    limit_expiry,
    matches_prefix,
    unavailable_reason,
)
from kedge.planning.digests import get_prefix_index
from kedge.turns import Turn, assistant, reasoning, user

TURN = Turn([user("a"), reasoning("hm"), assistant("b"), user("c")])
MONTH = 30 * 24 * 3600.0


def make_record(**facts: object) -> AnchorRecord:
    """Return a record of the first two covered blocks, with these fields replaced."""
    known = {"response_id": "R", "scope": "here", "digest": prefix_digest(TURN, 2)}
    return AnchorRecord(**{**known, "block_count": 2, **facts})  # pyright: ignore[reportArgumentType]


@for_each(
    ("facts", "expected"),
    [
        ({}, True),
        ({"block_count": 1}, False),
        ({"block_count": 3}, False),
        ({"block_count": 4}, False),
        ({"block_count": 10**30}, False),
        ({"block_count": 0, "digest": prefix_digest(TURN, 0)}, False),
        ({"block_count": -1}, False),
        ({"block_count": -1, "digest": "sha256:"}, False),
        ({"digest": ""}, False),
        ({"digest": prefix_digest(TURN, 2).removeprefix("sha256:")}, False),
        ({"digest": prefix_digest(TURN), "block_count": 3}, True),
    ],
)
def test_record_matches_only_its_own_prefix(facts: dict[str, object], expected: bool) -> None:
    """A record matches if its digest is that of the prefix of its length."""
    assert (
        matches_prefix(make_record(**facts), get_prefix_index(TURN), covered_count(TURN))
        is expected
    )


def test_record_of_a_longer_turn_does_not_match_the_shorter_one() -> None:
    """A record of a longer Turn does not match the Turn it grew from, although they share a prefix index."""
    longer = TURN.append(user("d"))
    later = make_record(digest=prefix_digest(longer), block_count=4)
    assert get_prefix_index(longer) is get_prefix_index(TURN)
    assert matches_prefix(later, get_prefix_index(longer), covered_count(longer))
    assert not matches_prefix(later, get_prefix_index(TURN), covered_count(TURN))


@for_each(
    ("facts", "now", "expired"),
    [
        ({}, 1e12, False),
        ({"created_at": 1.0, "expires_at": None}, 1e12, False),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH - 3601, False),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH - 3600, True),
        ({"created_at": 0.0, "expires_at": MONTH}, MONTH, True),
        # The margin is an hour, or less for a short retention.
        ({"created_at": 0.0, "expires_at": 100.0}, 94.0, False),
        ({"created_at": 0.0, "expires_at": 100.0}, 95.0, True),
        # A chain expires with its root.
        ({"root_created_at": 10.0, "created_at": 50.0, "expires_at": 150.0}, 104.0, False),
        ({"root_created_at": 10.0, "created_at": 50.0, "expires_at": 150.0}, 105.0, True),
        ({"root_created_at": 0.0, "created_at": 50.0, "expires_at": 150.0}, 144.0, False),
        # A record that expires before it was created is always expired.
        ({"created_at": 50.0, "expires_at": 10.0}, 10.0, True),
        ({"created_at": 50.0, "expires_at": 50.0}, 50.0, True),
    ],
)
def test_response_expires_with_a_margin_and_with_its_root(
    facts: dict[str, object], now: float, expired: bool
) -> None:
    """A response that the server may have dropped is expired before its time, and when its root expires."""
    assert is_expired(make_record(**facts), now) is expired


@for_each(
    ("facts", "reason"),
    [
        ({}, None),
        ({"response_id": ""}, "unproven"),
        ({"scope": "there"}, "scope"),
        ({"status": "lost"}, "lost"),
        ({"status": "incomplete"}, "incomplete"),
        ({"status": "failed"}, "incomplete"),
        ({"status": "cancelled"}, "incomplete"),
        ({"stored": False}, "unstored"),
        ({"created_at": 0.0, "expires_at": 10.0}, "expired"),
        ({"depth": 3}, None),
        ({"depth": 4}, "too_deep"),
    ],
)
def test_unavailable_response_has_a_reason(facts: dict[str, object], reason: Reason | None) -> None:
    """A response that the server cannot continue from has a reason, independent of the Turn."""
    assert unavailable_reason(make_record(**facts), scope="here", now=20.0, max_depth=3) == reason


@pytest.mark.parametrize(("created_at", "reason"), [(9.0, "lost"), (10.0, None)])
def test_response_of_an_earlier_time_is_lost(created_at: float, reason: Reason | None) -> None:
    """A response that was created before the server lost its data is not used."""
    record = make_record(created_at=created_at)
    assert unavailable_reason(record, scope="here", now=20.0, not_before=10.0) == reason


@pytest.mark.parametrize(
    ("expires_at", "retention", "limited"),
    [
        (None, None, None),
        (50.0, None, 50.0),
        (None, 30.0, 40.0),
        (50.0, 30.0, 40.0),
        (20.0, 30.0, 20.0),
    ],
)
def test_retention_limits_the_expiry(
    expires_at: float | None, retention: float | None, limited: float | None
) -> None:
    """A response expires with its retention, unless the server drops it before."""
    assert limit_expiry(10.0, expires_at, retention) == limited


@pytest.mark.parametrize(
    ("body", "hidden"), [({}, False), ({"prompt": None}, False), ({"prompt": {"id": "p"}}, True)]
)
def test_a_stored_prompt_hides_context(body: dict[str, object], hidden: bool) -> None:
    """The messages of a stored prompt are known to the server only."""
    assert has_hidden_context(body) is hidden


def test_depth_is_unlimited_by_default() -> None:
    """A chain of any depth is accepted if the server has no known maximum depth."""
    assert unavailable_reason(make_record(depth=10_000), scope="here", now=0.0) is None


def test_every_reason_has_a_message() -> None:
    """Every reason for rejecting a candidate has a message."""
    assert set(REASONS) == set(get_args(Reason))
    for reason, texts in REASONS.items():
        assert str(RejectedAnchor("R", reason, make_record())) == f"R: {texts}"


@for_each(
    ("text", "is_valid"),
    [
        ("[1200,900,100,0,5,140737488355328]", True),
        ("[1,2,3,4,5]", False),
        ("[1,2,3,4,5,6,7]", False),
        ("[1,2,3,4,5,true]", False),
        ("[1.0,2,3,4,5,6]", False),
        ('{"input":1}', False),
        ("null", False),
    ],
)
def test_token_counts_have_one_form(text: str, is_valid: bool) -> None:
    """Malformed counts are missing."""
    assert decode_token_counts(text) == (TokenCounts(*json.loads(text)) if is_valid else None)
