"""The laws of planning hold in randomly generated conversations, and they can fail.

``planning.simulation`` runs scripts of sends, edits, forks, losses and rebuilds against a model of a
server (``planning.reference_server``); ``planning.laws`` checks every plan.
"""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from kedge.planning import plan_request
from planning import faulty_planners
from planning.simulation import Planner, Script, Simulation, find_broken_law, scripts
from strategies import scale_examples


@settings(max_examples=scale_examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_laws_hold_in_random_conversations(script: Script) -> None:
    """All laws hold for random sequences of sends, edits, forks, expiry and losses."""
    Simulation().run(script)


FAULTY_PLANNERS: dict[str, tuple[Callable[[], Planner], str]] = {
    "contiguity only": (lambda: faulty_planners.contiguity_only, "coherence"),
    "latest only": (lambda: faulty_planners.latest_only, "minimality"),
    "trust without record": (lambda: faulty_planners.trust_latest, "coherence"),
    "sealed content without proof": (lambda: faulty_planners.resend_encrypted, "no leak"),
    "digests over raw JSON": (faulty_planners.RawDigests, "stability"),
}


@pytest.mark.parametrize("name", FAULTY_PLANNERS)
def test_laws_detect_a_faulty_planner(name: str) -> None:
    """For each faulty planner a random search finds a conversation in which it breaks the expected law."""
    make, law = FAULTY_PLANNERS[name]
    script = find(
        scripts(),
        lambda script: find_broken_law(make(), script) == law,
        settings=settings(
            max_examples=3_000,
            phases=[Phase.generate],  # no shrinking: finding the shortest script takes a minute
            database=None,
            derandomize=True,
            deadline=None,
        ),
    )
    assert find_broken_law(make(), script) == law
    assert find_broken_law(plan_request, script) == ""
