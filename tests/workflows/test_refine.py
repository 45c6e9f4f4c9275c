"""``refine``: repeats a request with the judge's critique until the answer passes."""

import math
from typing import Any, assert_type

import anyio
import pytest
from pydantic import BaseModel

from kedge.conversation import Conversation
from kedge.errors import InvalidSetting, InvalidWorkflow, WorkflowFailed
from kedge.store import Store
from kedge.turns import user
from kedge.workflows import (
    ModelJudge,
    RefineResult,
    Step,
    Verdict,
    list_workflows,
    load_workflow,
    refine,
    steps,
)

WARMER = (
    {"when": "warmer", "say": "8"},
    {"when": "much too cold", "say": "5"},
    {"when": "guess", "say": "2"},
)


def guess_eight(answer: str) -> Verdict:
    """Return a verdict that passes for the number eight."""
    number = int(answer)
    if number == 8:
        return Verdict(passed=True, score=1.0)
    critique = "You are getting warmer." if number >= 5 else "That is much too cold."
    return Verdict(passed=False, critique=critique, score=number / 8)


async def test_rounds_have_the_critique(store: Store, scripted: Any, connected: Any) -> None:
    """Each round chains on the last answer with its critique, up to a maximum; a stored result is not run again."""
    server = scripted(*WARMER)
    engine = connected(server)
    result = await refine("Please guess.", judge=guess_eight, store=store, engine=engine)
    assert result.passed
    assert [each.answer for each in result.rounds] == ["2", "5", "8"]
    assert [each.verdict.score for each in result.rounds] == [0.25, 0.625, 1.0]
    assert "much too cold" in result.rounds[1].question
    ids = [each.response_id for each in server.requests]
    assert [each.body.get("previous_response_id") for each in server.requests] == [None, *ids[:2]]
    assert result.usage.input_tokens > 0

    def never(answer: str) -> bool:
        raise AssertionError("judged again")

    repeated = await refine(
        "Please guess.", judge=never, store=store, engine=engine, workflow=result.workflow
    )
    assert len(server.requests) == 3
    assert repeated.answer == result.answer
    assert all(each.stored for each in repeated.rounds)
    result = await refine("Please guess.", judge=guess_eight, store=store, engine=engine, rounds=2)
    assert not result.passed
    assert result.answer == "5"
    assert (await load_workflow(store, result.workflow)).status == "failed"


async def test_task_may_have_a_nul(store: Store) -> None:
    """The title of the conversation, which may have none, is the task without it."""
    result = await refine("Say\0 hi.", judge=lambda _: True, store=store, engine="practice")
    assert (await store.conversation(result.conversation)).title == "Say hi."


async def test_values_of_a_verdict(store: Store, scripted: Any, connected: Any) -> None:
    """A judge may return a boolean, a score, or a critique that is empty if the answer passes, and nothing else."""
    engine = connected(scripted())
    opinions = [(True, True), (False, False), (1.0, True), (0.4, False), ("", True), ("No.", False)]
    for opinion, passed in opinions:

        async def judge(_: str, opinion: Any = opinion) -> Any:
            return opinion

        result = await refine("Hello", judge=judge, store=store, engine=engine, rounds=1)
        assert result.passed is passed
    result = await refine(
        "Hello", judge=lambda answer: assert_type(answer, str) != "", store=store, engine=engine
    )
    assert result.passed
    place: Any = {"store": store, "engine": engine, "workflow": "w1"}
    for wrong, message in (
        (None, "or a Verdict, not NoneType"),
        (math.nan, "the score of a judge must be a finite number, not nan"),
        (math.inf, "the score of a judge must be a finite number, not inf"),
        (10**400, "the score of a judge must be a finite number, not 1000"),
        (10**5000, "must be a finite number, not an integer of thousands of digits"),
    ):
        answers: dict[str, Any] = {"judge": lambda _, wrong=wrong: wrong}
        with pytest.raises(InvalidSetting, match=message):
            await refine("Hello", **answers, **place)
    result = await refine("Hello", judge=lambda answer: 1.0, **place)
    assert [each.stored for each in result.rounds] == [True]


class Ship(BaseModel):
    """A ship."""

    name: str
    masts: int


@pytest.mark.parametrize("form", [Ship, Ship.model_json_schema()], ids=["pydantic", "schema"])
async def test_answer_must_match_its_schema(
    form: Any, store: Store, scripted: Any, connected: Any
) -> None:
    """The schema is sent to the server, and an answer that does not match is requested again."""
    server = scripted(
        {"when": "must fit its schema", "say": '{"name": "Argo", "masts": 1}'},
        {"when": "ship", "say": '```json\n{"name": "Argo"}\n```'},
    )
    result = await refine("Name a ship.", judge=form, store=store, engine=connected(server))
    assert [each.verdict.passed for each in result.rounds] == [False, True]
    assert "masts" in result.rounds[0].verdict.critique
    text_format = server.requests[0].body["text"]["format"]
    assert text_format["type"] == "json_schema"
    assert text_format["strict"] is True


async def test_unreadable_verdict_is_repeated(store: Store, scripted: Any, connected: Any) -> None:
    """The workflow fails after three invalid verdicts, and requests one more when resumed, without tools."""
    bench = scripted({"when": "Write the whole answer again", "say": "Well…"}, {"say": "Hmm."})
    judge = ModelJudge(connected(bench), "It is good.")
    with pytest.raises(WorkflowFailed, match="did not answer in the requested format") as exc_info:
        await refine("Hello", judge=judge, store=store, engine=connected(scripted()))
    assert len(bench.requests) == 3
    workflow = exc_info.value.workflow
    assert (await load_workflow(store, workflow)).status == "running"
    server = scripted({"say": '{"passed": true, "critique": ""}'})
    judge = ModelJudge(connected(server), "It is good.")
    author = scripted()
    settings: Any = {"workflow": workflow, "tools": [guess_eight]}
    result = await refine("Hello", judge=judge, store=store, engine=connected(author), **settings)
    assert result.passed
    (request,) = server.requests
    assert "tools" not in request.body


async def test_model_judge_has_its_own_chain(store: Store, scripted: Any, connected: Any) -> None:
    """It gets the rubric once and each answer, and its tokens are those of the workflow."""
    passed, failed = ('{"passed": %s, "critique": "Warmer."}' % each for each in ("true", "false"))  # noqa: UP031
    bench, author = scripted({"when": "was changed", "say": passed}, {"say": failed}), scripted()
    judge = ModelJudge(connected(bench), "It is good.")
    result = await refine("Hello", judge=judge, store=store, engine=connected(author))
    assert [each.verdict.critique for each in result.rounds] == ["Warmer.", ""]
    assert ["It is good." in str(each.body["input"]) for each in bench.requests] == [True, False]
    assert bench.requests[1].body["previous_response_id"] == bench.requests[0].response_id
    counted = [row.usage for row in await store.responses() if row.usage]
    assert result.usage.input_tokens == sum(each.input_tokens for each in counted)


async def test_several_workflows(store: Store, scripted: Any, connected: Any) -> None:
    """Each workflow has its own record of task, verdicts, status and exchanges."""
    conversation = await Conversation.create(connected(scripted()), store=store)
    await conversation.send("My ship is the Argo.")
    first = await refine(
        "What is my ship?", judge=lambda answer: "Argo" in answer, conversation=conversation
    )
    second = await refine(
        "What did I say first?", judge=lambda _: "Longer.", rounds=1, conversation=conversation
    )
    reopened = await Conversation.open(conversation.engine, store=store, id=conversation.id)
    third = await refine("What is 2+3?", judge=lambda answer: "5" in answer, conversation=reopened)
    for result, task, status in (
        (first, "What is my ship?", "passed"),
        (second, "What did I say first?", "failed"),
        (third, "What is 2+3?", "passed"),
    ):
        workflow = await load_workflow(store, result.workflow)
        assert (workflow.spec["task"], workflow.status) == (task, status)
        assert [each.passed for each in workflow.verdicts] == [status == "passed"]
        ((exchange,),) = [chain.exchanges for chain in workflow.chains]
        assert (exchange.question, exchange.answer) == (task, result.answer)
    workflows = await list_workflows(store, kind="refine")
    assert [each.id for each in workflows] == [third.workflow, second.workflow, first.workflow]
    resumed = await refine(
        "What is my ship?",
        judge=lambda answer: "Argo" in answer,
        conversation=conversation,
        workflow=first.workflow,
    )
    assert resumed.rounds[0].stored


async def test_two_runners_share_one_verdict(store: Store, scripted: Any, connected: Any) -> None:
    """The verdict that is stored first counts for both, and the workflow can be resumed."""
    server = scripted(*WARMER)
    engine = connected(server)
    judging, finished = anyio.Event(), anyio.Event()
    results: list[RefineResult] = []

    async def judge_late(answer: str) -> Verdict:
        judging.set()
        await finished.wait()
        return Verdict(passed=False, critique="Use other words.")

    async def run(judge: Any) -> None:
        results.append(
            await refine("Please guess.", judge=judge, store=store, engine=engine, workflow="both")
        )

    async with anyio.create_task_group() as group:
        group.start_soon(run, judge_late)
        await judging.wait()
        await run(guess_eight)
        finished.set()
    await run(guess_eight)
    assert [[each.answer for each in one.rounds] for one in results] == [["2", "5", "8"]] * 3
    assert len(server.requests) == 3
    assert (await load_workflow(store, "both")).status == "passed"


async def test_copies_are_not_in_the_workflow(store: Store, scripted: Any, connected: Any) -> None:
    """Forks, copies and equal tags are no part of a workflow; data of an application under its name is unchanged."""
    engine = connected(scripted({"say": "2"}))
    for own in (None, await Conversation.create(engine, store=store, title="Mine")):
        given: dict[str, Any] = {"conversation": own} if own else {"store": store, "engine": engine}
        result = await refine("Please guess.", judge=bool, **given)
        lead = await Conversation.open(engine, store=store, id=result.conversation)
        fork = await lead.fork(title="A fork")
        await fork.send("Hello")
        await Conversation.import_(store, await lead.export())
        tagged = await Conversation.create(engine, store=store)
        await tagged.tag("workflow", f"workflow:{result.workflow}")
        (found,) = [each for each in await list_workflows(store) if each.id == result.workflow]
        assert found.title == lead.title
        loaded = await load_workflow(store, result.workflow)
        assert [chain.conversation for chain in loaded.chains] == [lead.id]
    for data in ({"workflow": "approval"}, {"workflow": {"stage": 1}}):
        conversation = await Conversation.create(engine, store=store, data=data)
        result = await refine("Please guess.", judge=bool, conversation=conversation)
        row = await store.conversation(conversation.id)
        assert row.data["workflow"] == data["workflow"]
        assert (await load_workflow(store, result.workflow)).status == "passed"


async def test_invalid_arguments_are_rejected(store: Store, scripted: Any, connected: Any) -> None:
    """Wrong arguments and settings and a missing engine raise `InvalidSetting`, and nothing is stored."""
    engine = connected(scripted())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rounds": 0}, "rounds must be an integer of at least 1, not 0"),
        ({"rounds": 1.5}, "rounds must be int, not float"),
        ({"judge": 3}, "or a ModelJudge, not int"),
        ({"task": user("Hello")}, "task must be str, not UserBlock"),
        ({"again": None}, "again must be str, not NoneType"),
        ({"on_event": 3}, "on_event must be a function that is not async, not 3"),
        (
            {"on_event": refine},
            "on_event must be a function that is not async, not <function refine",
        ),
        ({"model": "practice", "title": "Ship"}, "determines model, title"),
    ]
    for settings, message in wrong:
        with pytest.raises(InvalidSetting, match=message):
            await refine(
                **{"task": "Hello", "judge": bool, "store": store, "engine": engine, **settings}
            )
    with pytest.raises(InvalidWorkflow, match="a store and an engine"):
        await refine("Hello", judge=bool, store=store)
    with pytest.raises(InvalidSetting, match="not a valid JSON schema"):
        await refine("Hello", judge={"type": "ship"}, store=store, engine=engine)
    conversation = await Conversation.create(engine, store=store)
    with pytest.raises(InvalidWorkflow, match="conversation= has its own middleware, tools"):
        await refine("Hello", judge=bool, conversation=conversation, tools=[str], middleware=[])
    both: list[dict[str, Any]] = [{"store": store}, {"engine": "practice"}]
    for beside in both:
        (name,) = beside
        with pytest.raises(InvalidWorkflow, match=f"conversation= has its own {name}; leave it"):
            await refine("Hello", judge=bool, conversation=conversation, **beside)
        with pytest.raises(InvalidWorkflow, match=f"conversation= has its own {name}; leave it"):
            await steps([Step("a", "Hi")], conversation=conversation, **beside)
    assert await list_workflows(store) == []
