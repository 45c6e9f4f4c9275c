"""The prediction for a prompt cache: which earlier prompt is read again, and why no more is."""

from typing import Any

from for_each import for_each
from kedge.planning import TokenCounts, get_state, set_state
from kedge.planning.cache_plan import CacheRules, plan_cache
from kedge.turns import Turn, user
from planning.recorded_turns import NOW, add_response, compaction_block, make_plan

RULES = CacheRules(minimum=1_000, step=100, lifetime=60.0)


def send(turn: Turn, number: int, tokens: int, **facts: Any) -> Turn:
    """Return a Turn with a long message and its answer, whose prompt had these tokens."""
    facts = {"counted": TokenCounts(tokens, 0, 150, 0, 0, settings=1), **facts}
    turn = turn.append(user(f"{number}" * 4_000))
    return add_response(turn, f"R{number}", created_at=NOW + number, **facts)


SENT = send(send(Turn(), 1, 2_000), 2, 4_000)
EDITED = SENT.edit(SENT[2].id, user("edited" * 2_000))
SHORTER = send(SENT.take(2), 3, 3_000)
BRANCH = send(send(SENT, 3, 6_000).take(2), 4, 3_000)
UNDONE = set_state(SENT, get_state(SENT).with_anchor(get_state(SHORTER).anchors[-1]))


@for_each(
    ("turn", "options", "cached", "lost", "reason"),
    [
        (Turn([user("Hi")]), {}, 0, 0, "first"),
        (SENT, {}, 4_000, 0, ""),
        (SENT, {"now": NOW + 61}, 4_000, 0, ""),
        (SENT, {"now": NOW + 62}, 0, 0, "expired"),
        (SENT, {"settings": 2}, 0, 4_000, "settings"),
        (send(Turn(), 1, 999), {}, 0, 0, "short"),
        (send(Turn(), 1, 1_000), {}, 1_000, 0, ""),
        # The prompt before the edit was followed by its answer, which some providers cache with it.
        (EDITED, {}, 2_100, 1_900, "edited"),
        (EDITED, {"explicit": True}, 2_000, 2_000, "edited"),
        # The longest prompt that is a prefix need not be the newest one, nor that the longest one.
        (UNDONE, {}, 4_100, 0, ""),
        (BRANCH.edit(BRANCH[2].id, user("edited" * 2_000)), {}, 2_100, 900, "edited"),
        # Neither the prompts of another server nor those before a compaction are read.
        (send(SENT, 3, 9_000, scope="there"), {}, 4_000, 0, ""),
        (SENT.append(compaction_block("c", origin="compact"), user("u")), {}, 0, 0, ""),
    ],
)
def test_cached_tokens_are_those_of_the_longest_known_prompt(
    turn: Turn, options: dict[str, Any], cached: int, lost: int, reason: str
) -> None:
    """The newest prompt is read from the cache, or after an edit an earlier one; a miss has a reason."""
    plan = make_plan(turn, now=options.get("now", NOW + 10))
    rules = CacheRules(RULES.minimum, RULES.step, RULES.lifetime, options.get("explicit", False))
    found = plan_cache(turn, plan, rules=rules, settings=options.get("settings", 1))
    assert (found.cached_tokens, found.lost_tokens, found.reason) == (cached, lost, reason)
