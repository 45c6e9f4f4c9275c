"""``steps``: prompts on one chain, with typed results between them."""

from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel

from kedge.conversation import Conversation
from kedge.errors import InvalidSetting, InvalidWorkflow, WorkflowFailed
from kedge.store import Store
from kedge.workflows import Side, Step, debate, list_workflows, load_workflow, refine, steps
from kedge.workflows.results import AnswerJudged, QuestionAnswered, QuestionAsked


class Voyage(BaseModel):
    """A voyage."""

    ship: str
    days: int


ANSWERS = (
    {"when": "Plan", "say": '{"ship": "Argo", "days": 12}'},
    {"when": "log", "say": "Calm seas."},
)
PIPELINE = (
    Step("voyage", "Plan a voyage to {place}.", Voyage),
    Step("log", "Write the log of the {voyage.ship}, {voyage.days} days."),
    Step("all", "Check {voyage} and {{this}} and {log}"),
)


async def test_results_are_used_in_next_prompt(store: Store, scripted: Any, connected: Any) -> None:
    """Each step chains on the previous one, and its prompt may contain earlier results."""
    server = scripted(*ANSWERS)
    result = await steps(
        PIPELINE, inputs={"place": "Colchis"}, store=store, engine=connected(server)
    )
    assert result["voyage"] == Voyage(ship="Argo", days=12)
    questions = [step.question for step in result.steps]
    assert questions[0] == "Plan a voyage to Colchis."
    assert questions[1] == "Write the log of the Argo, 12 days."
    assert questions[2] == 'Check {"ship": "Argo", "days": 12} and {this} and Calm seas.'
    assert result.value == result.steps[-1].answer
    ids = [each.response_id for each in server.requests]
    assert [each.body.get("previous_response_id") for each in server.requests] == [None, *ids[:2]]
    assert "text" not in server.requests[1].body
    with pytest.raises(KeyError):
        result["nothing"]


async def test_invalid_answers_fail_a_step(store: Store, scripted: Any, connected: Any) -> None:
    """After the maximum number of attempts, the error has the id of the workflow, which can be continued."""
    server = scripted({"say": "No."})
    step = Step("voyage", "Plan a voyage.", Voyage, attempts=2)
    with pytest.raises(WorkflowFailed, match="did not match its schema, 2 times") as exc_info:
        await steps([step], store=store, engine=connected(server))
    assert len(server.requests) == 2
    name = exc_info.value.workflow
    workflow = await load_workflow(store, name)
    assert workflow.status == "failed"
    (chain,) = workflow.chains
    assert [(each.number, each.answer) for each in chain.exchanges] == [(1, "No."), (1, "No.")]
    server = scripted({"say": '{"ship": "Argo", "days": 3}'})
    both = [step, Step("next", "Plan another voyage.", Voyage)]
    result = await steps(both, store=store, engine=connected(server), workflow=name)
    assert result["voyage"] == Voyage(ship="Argo", days=3)
    assert [each.attempts for each in result.steps] == [3, 1]
    assert len(server.requests) == 2
    assert (await load_workflow(store, name)).status == "finished"


async def test_attempts_are_reported(store: Store, scripted: Any, connected: Any) -> None:
    """Each answer and its problems are reported as events; a refusal is not requested again."""
    server = scripted(
        {"when": "does not have the form", "refuse": "I do not sail."}, {"say": "No."}
    )
    events: list[Any] = []
    step = Step("voyage", "Plan a voyage.", Voyage)
    with pytest.raises(WorkflowFailed):
        await steps([step], store=store, engine=connected(server), on_event=events.append)
    attempt = [QuestionAsked, QuestionAnswered, AnswerJudged]
    assert [type(event) for event in events[1:]] == attempt * 2
    assert [e.text for e in events if isinstance(e, QuestionAnswered)] == ["No.", "I do not sail."]
    first, last = [e.verdict for e in events if isinstance(e, AnswerJudged)]
    assert first.critique.startswith("- the answer")
    assert last.critique == "- I do not sail."


async def test_finished_steps_are_stored(store: Store, scripted: Any, connected: Any) -> None:
    """Running a finished workflow again sends no request."""
    server = scripted(*ANSWERS)
    engine = connected(server)
    inputs = {"place": "Colchis"}
    first = await steps(PIPELINE, inputs=inputs, store=store, engine=engine)
    repeated = await steps(
        PIPELINE, inputs=inputs, store=store, engine=engine, workflow=first.workflow
    )
    assert len(server.requests) == 3
    assert [each.value for each in repeated.steps] == [each.value for each in first.steps]
    conversation = await Conversation.open(engine, store=store, id=first.conversation)
    with pytest.raises(InvalidWorkflow, match="is a steps workflow, not a refine workflow"):
        await refine("x", judge=bool, workflow=first.workflow, conversation=conversation)


async def test_an_id_belongs_to_one_kind_of_workflow(store: Store) -> None:
    """The id of a workflow is rejected for another kind, in a store and in a caller's conversation."""
    await steps([Step("a", "Hi")], store=store, engine="practice", workflow="w1")
    async with await Conversation.create("practice", store=store) as conversation:
        places: list[Any] = [{"store": store, "engine": "practice"}, {"conversation": conversation}]
        for place in places:
            with pytest.raises(InvalidWorkflow, match="w1 is a steps workflow, not a refine"):
                await refine("x", judge=bool, workflow="w1", **place)
    sides = (Side("a", "practice"), Side("b", "practice"))
    with pytest.raises(InvalidWorkflow, match="w1 is a steps workflow, not a debate workflow"):
        await debate("x?", sides, store=store, judge=lambda _: "a", workflow="w1")
    await debate("x?", sides, store=store, judge=lambda _: "a", workflow="w2", rounds=1)
    with pytest.raises(InvalidWorkflow, match="w2 is a debate workflow, not a steps workflow"):
        await steps([Step("a", "Hi")], store=store, engine="practice", workflow="w2")
    kinds = {each.id: each.kind for each in await list_workflows(store)}
    assert kinds == {"w1": "steps", "w2": "debate"}


async def test_invalid_pipeline_is_rejected_before_sending(store: Store) -> None:
    """A mistake in a template or step, and wrong arguments, raise an error before any request."""
    place: dict[str, Any] = {"store": store, "engine": "practice"}
    for pipeline, message in (
        (list[Step](), "at least one step"),
        ([Step("a", "{b}"), Step("b", "x")], "uses 'b'; there is place"),
        ([Step("a", "x"), Step("a", "y")], "used twice"),
        ([Step("place", "x")], "used twice"),
        ([Step("a", "a { b")], "single '{'"),
    ):
        with pytest.raises(InvalidWorkflow) as exc_info:
            await steps(pipeline, inputs={"place": "x"}, **place)
        assert message in str(exc_info.value)
    wrong: Any
    for wrong, message in (
        ("ab", "pipeline must be a list of Step, not str"),
        (None, "pipeline must be a list of Step, not NoneType"),
        (5, "pipeline must be a list of Step, not int"),
        (["a"], "pipeline must be a list of Step, not a list of str"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            await steps(wrong, **place)
    for wrong in ([1], "ab", [("a", "b")]):
        with pytest.raises(InvalidSetting, match="inputs must be a mapping or None"):
            await steps([Step("a", "x")], inputs=wrong, **place)
    with pytest.raises(InvalidSetting, match=r"inputs\.day: a value of type date is not JSON"):
        await steps([Step("a", "{day}")], inputs={"day": date(2026, 1, 2)}, **place)
    with pytest.raises(InvalidSetting, match="the schema of b"):
        await steps([Step("a", "x"), Step("b", "x", result=5)], **place)
    assert await list_workflows(store) == []
    inputs = {"place": "x", "things": [1]}
    for prompt in ("{place.title}", "{place.__class__}", "{things.9}", "{things.²}"):
        with pytest.raises(InvalidWorkflow, match="to put into the prompt"):
            await steps([Step("a", prompt)], inputs=inputs, **place)
    with pytest.raises(InvalidWorkflow):
        Step(prompt="x", name="two words")
    for wrong in ({"attempts": 0}, {"name": 5}, {"prompt": None}):
        with pytest.raises(InvalidSetting, match=r"of (the|a) step"):
            Step(**{"name": "a", "prompt": "x", **wrong})


async def test_result_may_have_any_type(store: Store, scripted: Any, connected: Any) -> None:
    """A list is wrapped in an object for the server, and unwrapped for the next prompt."""
    server = scripted({"when": "ships", "say": '{"value": ["Argo", "Beagle"]}'}, {"say": "ok"})
    pipeline = [Step("ships", "List the ships.", list[str]), Step("all", "Check {ships}.")]
    result = await steps(pipeline, store=store, engine=connected(server))
    assert result["ships"] == ["Argo", "Beagle"]
    assert result.steps[1].question == 'Check ["Argo", "Beagle"].'
    assert server.requests[0].body["text"]["format"]["strict"] is True
    with pytest.raises(InvalidSetting, match="schema of ships"):
        await steps([Step("ships", "List.", 3)], store=store, engine=connected(server))
