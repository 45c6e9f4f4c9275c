"""``debate``: each side has its own chain and server, and only text is passed between them."""

from typing import Any

import pytest

from kedge.errors import InvalidSetting, InvalidWorkflow, KedgeError
from kedge.store import Store
from kedge.testing import TestServer
from kedge.workflows import (
    DebateArgument,
    ModelJudge,
    Ruling,
    Side,
    WorkflowEvent,
    debate,
    list_workflows,
    load_workflow,
)

TEA = ({"when": "Coffee wakes", "say": "Tea keeps."}, {"when": "debate", "say": "Tea calms."})
COFFEE = ({"when": "Tea calms", "say": "So be it."}, {"when": "debate", "say": "Coffee wakes."})


def response_ids(server: TestServer) -> set[str]:
    """Return the ids of a server's responses."""
    return {each.response_id or "" for each in server.requests}


async def test_chains_never_cross_providers(store: Store, scripted: Any, connected: Any) -> None:
    """Every id that is sent to a server is one of that server, and the store has a chain for each side."""
    tea, coffee, bench = (
        scripted(*TEA),
        scripted(*COFFEE),
        scripted(
            {"when": "Round 2", "say": '{"decided": true, "winner": "tea", "reason": "It keeps."}'},
            {"say": '{"decided": false, "winner": "nobody", "reason": "Too early."}'},
        ),
    )
    result = await debate(
        "Tea or coffee?",
        [Side("tea", connected(tea)), Side("coffee", connected(coffee), "Coffee is better.")],
        judge=ModelJudge(connected(bench), "Who has the better reasons?"),
        store=store,
        rounds=3,
    )
    assert result.winner == "tea"
    assert result.rounds == 2
    for server in (tea, coffee, bench):
        assert len(server.requests) == 2
        previous = [each.body.get("previous_response_id") for each in server.requests]
        assert previous == [None, server.requests[0].response_id]
    arguments = [(each.round, each.side, each.text) for each in result.arguments]
    assert arguments == [
        (1, "tea", "Tea calms."),
        (1, "coffee", "Coffee wakes."),
        (2, "tea", "Tea keeps."),
        (2, "coffee", "So be it."),
    ]
    assert "You stand for this: Coffee is better." in str(coffee.requests[0].body["input"])
    workflow = await load_workflow(store, result.workflow)
    assert (workflow.kind, workflow.status) == ("debate", "decided")
    assert [chain.role for chain in workflow.chains] == ["tea", "coffee", "judge"]
    answers = [(each.number, each.answer) for each in workflow.chains[0].exchanges]
    assert answers == [(1, "Tea calms."), (2, "Tea keeps.")]
    assert [ruling.over for ruling in workflow.rulings] == [False, True]
    assert [each.id for each in await list_workflows(store, kind="debate")] == [result.workflow]
    assert await list_workflows(store, kind="refine") == []


async def test_more_than_two_sides(store: Store, scripted: Any, connected: Any) -> None:
    """With three sides, each receives the arguments of both others in the round before."""
    server = scripted({"say": "Yes."})
    sides = [Side(name, connected(server)) for name in ("tea", "coffee", "water")]
    result = await debate("What?", sides, judge=lambda arguments: None, store=store, rounds=3)
    assert not result.ruling.over
    assert len(result.arguments) == 9
    last = str(server.requests[-1].body["input"])
    assert last.count(" says:") == 2
    assert (await load_workflow(store, result.workflow)).status == "undecided"


async def test_last_round_is_decided(store: Store, scripted: Any, connected: Any) -> None:
    """A model that has not decided in the last round has named a winner, or nobody."""
    sides = [Side(name, connected(scripted())) for name in ("tea", "coffee")]
    for named, winner in (("tea", "tea"), ("nobody", "")):
        answer = f'{{"decided": false, "winner": "{named}", "reason": "Both."}}'
        judge = ModelJudge(connected(scripted({"say": answer})), "Who has the better reasons?")
        result = await debate("?", sides, judge=judge, store=store, rounds=1)
        assert (result.ruling.over, result.winner) == (True, winner)


async def test_failed_side_stops_no_other(store: Store, scripted: Any, connected: Any) -> None:
    """Arguments of the other sides are stored, and are not requested again when the debate continues."""
    tea, coffee = scripted(*TEA), scripted(*COFFEE)
    sides = [Side("tea", connected(tea)), Side("coffee", connected(coffee))]
    coffee.faults.set("status=500", times=1)
    settings: Any = {"judge": lambda arguments: "tea", "store": store, "workflow": "wf_one"}
    with pytest.raises(KedgeError):
        await debate("Tea or coffee?", sides, **settings)
    result = await debate("Tea or coffee?", sides, **settings)
    assert result.winner == "tea"
    assert len(tea.requests) == 1
    assert [each.stored for each in result.arguments] == [True, False]


async def test_winner_must_be_a_side(store: Store, scripted: Any, connected: Any) -> None:
    """A debate needs two different names that are not reserved, a round, and a ruling for a side."""
    sides = [Side(name, connected(scripted())) for name in ("tea", "coffee")]
    with pytest.raises(InvalidWorkflow, match="is not a side: 'water'"):
        await debate("?", sides, judge=lambda arguments: "water", store=store)
    wrong: Any = lambda arguments: 3  # noqa: E731
    with pytest.raises(InvalidSetting, match="or None, not int"):
        await debate("?", sides, judge=wrong, store=store)
    for wrong, message in (
        ("ab", "sides must be a list of Side, not str"),
        (None, "sides must be a list of Side, not NoneType"),
        (5, "sides must be a list of Side, not int"),
        (["tea", "coffee"], "sides must be a list of Side, not a list of str"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            await debate("?", wrong, judge=lambda arguments: "tea", store=store)
    for wrong in (["?"], None, 5):
        with pytest.raises(InvalidSetting, match="question must be str, not "):
            await debate(wrong, sides, judge=lambda arguments: "tea", store=store)
    for wrong in ({"name": 5}, {"brief": None}, {"engine": 5}):
        with pytest.raises(InvalidSetting, match="must be"):
            Side(**{"name": "a", "engine": "practice", **wrong})
    for wrong in ({"winner": 5}, {"over": "no"}):
        with pytest.raises(InvalidSetting, match="of a ruling must be"):
            Ruling(**{"over": True, **wrong})
    cases = (["a"], 1), (["a", "a"], 1), (["a", "judge"], 1), (["a", "b"], 0), (["a", "b"], "2")
    rounds: Any
    for names, rounds in cases:
        sides = [Side(name, "practice") for name in names]
        with pytest.raises(InvalidSetting):
            await debate("?", sides, judge=lambda arguments: None, store=store, rounds=rounds)


async def test_judge_receives_all_arguments(store: Store, scripted: Any, connected: Any) -> None:
    """A judge function receives all arguments so far, in order, and may be asynchronous."""
    received: list[tuple[DebateArgument, ...]] = []
    events: list[WorkflowEvent] = []

    async def judge(arguments: tuple[DebateArgument, ...]) -> Ruling:
        received.append(arguments)
        return Ruling(over=len(received) == 2, winner="tea", reason="enough")

    sides = [Side("tea", connected(scripted(*TEA))), Side("coffee", connected(scripted(*COFFEE)))]
    await debate("?", sides, judge=judge, store=store, on_event=events.append)
    assert [len(arguments) for arguments in received] == [2, 4]
    assert [type(each).__name__ for each in events].count("RoundRuled") == 2
