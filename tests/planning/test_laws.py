"""The laws of planning hold in randomly generated conversations, and they can fail.

``planning.simulation`` runs scripts of sends, edits, forks, losses and rebuilds against a model of a
server (``planning.reference_server``); ``planning.laws`` checks every plan.
"""

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from kedge.planning import plan_request
from planning.faulty_planners import contiguity_only, resend_encrypted
from planning.simulation import Planner, Script, Simulation, find_broken_law, scripts
from strategies import scale_examples


@settings(max_examples=scale_examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_laws_hold_in_random_conversations(script: Script) -> None:
    """All laws hold for random sequences of sends, edits, forks, expiry and losses."""
    Simulation().run(script)


@pytest.mark.parametrize(
    ("planner", "law"), [(contiguity_only, "coherence"), (resend_encrypted, "no leak")]
)
def test_laws_detect_a_faulty_planner(planner: Planner, law: str) -> None:
    """For each faulty planner a random search finds a conversation in which it breaks the expected law."""
    script = find(
        scripts(),
        lambda script: find_broken_law(planner, script) == law,
        settings=settings(
            max_examples=3_000,
            phases=[Phase.generate],  # no shrinking: finding the shortest script takes a minute
            database=None,
            derandomize=True,
            deadline=None,
        ),
    )
    assert find_broken_law(planner, script) == law
    assert find_broken_law(plan_request, script) == ""
