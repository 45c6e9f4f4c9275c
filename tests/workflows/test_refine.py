"""``refine``: it asks again with the critique, stops when it is good, and pays once for each answer."""

from typing import Any

import pytest
from pydantic import BaseModel

from kedge.conversation import Conversation
from kedge.errors import InvalidWorkflow, WorkflowFailed
from kedge.store import Store
from kedge.workflows import (
    AnswerJudged,
    ModelJudge,
    QuestionAnswered,
    QuestionAsked,
    Verdict,
    WorkflowEvent,
    WorkflowFinished,
    WorkflowStarted,
    list_workflows,
    load_workflow,
    refine,
)

WARMER = (
    {"when": "warmer", "say": "8"},
    {"when": "much too cold", "say": "5"},
    {"when": "guess", "say": "2"},
)


def guess_eight(answer: str) -> Verdict:
    """The number is eight."""
    number = int(answer)
    if number == 8:
        return Verdict(passed=True, score=1.0)
    critique = "You are getting warmer." if number >= 5 else "That is much too cold."
    return Verdict(passed=False, critique=critique, score=number / 8)


async def test_each_round_is_asked_with_the_critique(
    store: Store, scripted: Any, connected: Any
) -> None:
    """The answers get better because of what the judge said, on one chain."""
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


async def test_it_ends_when_the_rounds_are_over(
    store: Store, scripted: Any, connected: Any
) -> None:
    """The last answer is given, and said not to have passed."""
    engine = connected(scripted(*WARMER))
    result = await refine("Please guess.", judge=guess_eight, store=store, engine=engine, rounds=2)
    assert not result.passed
    assert result.answer == "5"
    assert (await load_workflow(store, result.workflow)).status == "failed"


@pytest.mark.parametrize(
    ("opinion", "passed"),
    [(True, True), (False, False), (1.0, True), (0.4, False), ("", True), ("No.", False)],
)
async def test_judge_function_may_return_any_verdict_value(
    opinion: Any, passed: bool, store: Store, scripted: Any, connected: Any
) -> None:
    """True or False, a score, or a critique that is empty if all is well."""
    engine = connected(scripted())

    async def judge(answer: str) -> Any:
        return opinion

    result = await refine("Hello", judge=judge, store=store, engine=engine, rounds=1)
    assert result.passed is passed


async def test_what_is_no_opinion_is_refused(store: Store, scripted: Any, connected: Any) -> None:
    """None is not taken for a no."""
    engine = connected(scripted())
    judge: Any = lambda answer: None  # noqa: E731
    with pytest.raises(InvalidWorkflow, match="not a NoneType"):
        await refine("Hello", judge=judge, store=store, engine=engine)
    with pytest.raises(InvalidWorkflow, match="not a int"):
        await refine("Hello", judge=3, store=store, engine=engine)  # pyright: ignore[reportArgumentType]


class Ship(BaseModel):
    """A ship."""

    name: str
    masts: int


@pytest.mark.parametrize("form", [Ship, Ship.model_json_schema()], ids=["pydantic", "schema"])
async def test_an_answer_must_fit_its_schema(
    form: Any, store: Store, scripted: Any, connected: Any
) -> None:
    """The server is asked for the form, and what does not fit is asked for again, by name."""
    server = scripted(
        {"when": "must fit its schema", "say": '{"name": "Argo", "masts": 1}'},
        {"when": "ship", "say": '```json\n{"name": "Argo"}\n```'},
    )
    result = await refine("Name a ship.", judge=form, store=store, engine=connected(server))
    assert [each.verdict.passed for each in result.rounds] == [False, True]
    assert "masts" in result.rounds[0].verdict.critique
    asked = server.requests[0].body["text"]["format"]
    assert asked["type"] == "json_schema"
    assert asked["strict"] is True


async def test_a_model_judges_on_a_chain_of_its_own(
    store: Store, scripted: Any, connected: Any
) -> None:
    """Judge and author are two conversations on two servers, and never mix."""
    author = scripted({"when": "shorter", "say": "Hi."}, {"when": "greet", "say": "Good day!"})
    bench = scripted(
        {"when": "Hi.", "say": '{"passed": true, "critique": ""}'},
        {"when": "Good day!", "say": '{"passed": false, "critique": "Make it shorter."}'},
    )
    judge = ModelJudge(connected(bench), "It is shorter than four letters.")
    result = await refine("Please greet.", judge=judge, store=store, engine=connected(author))
    assert result.passed
    assert result.answer == "Hi."
    assert len(author.requests) == len(bench.requests) == 2
    for server in (author, bench):
        own = {each.response_id for each in server.requests}
        used = {each.body.get("previous_response_id") for each in server.requests} - {None}
        assert used
        assert used <= own
    found = await load_workflow(store, result.workflow)
    assert [chain.role for chain in found.chains] == ["author", "judge"]


async def test_a_judge_that_cannot_be_read_is_asked_again(
    store: Store, scripted: Any, connected: Any
) -> None:
    """Three times; then the workflow fails, and says which it was. Resumed, it asks once more."""
    bench = scripted({"when": "Write the whole answer again", "say": "Well…"}, {"say": "Hmm."})
    judge = ModelJudge(connected(bench), "It is good.")
    with pytest.raises(WorkflowFailed, match="did not answer in the requested format") as caught:
        await refine("Hello", judge=judge, store=store, engine=connected(scripted()))
    assert len(bench.requests) == 3
    workflow = caught.value.workflow
    assert (await load_workflow(store, workflow)).status == "running"
    better = scripted({"say": '{"passed": true, "critique": ""}'})
    judge = ModelJudge(connected(better), "It is good.")
    result = await refine(
        "Hello", judge=judge, store=store, engine=connected(scripted()), workflow=workflow
    )
    assert result.passed
    assert len(better.requests) == 1


async def test_own_conversation_is_refined(store: Store, scripted: Any, connected: Any) -> None:
    """What was said before is part of the chain, and the conversation can go on afterwards."""
    conversation = await Conversation.create(store, connected(scripted()), data={"mine": 1})
    await conversation.send("My ship is the Argo.")
    result = await refine(
        "What is my ship?", judge=lambda answer: "Argo" in answer, conversation=conversation
    )
    assert result.answer == "Your ship is the Argo."
    assert result.conversation == conversation.id
    assert (await conversation.send("What did I say first?")).text.endswith(
        '"My ship is the Argo."'
    )
    found = await load_workflow(store, result.workflow)
    assert [each.question for each in found.chains[0].exchanges] == ["What is my ship?"]
    assert (await store.conversation(conversation.id)).data["mine"] == 1


async def test_a_conversation_serves_several_workflows(
    store: Store, scripted: Any, connected: Any
) -> None:
    """Each has a record of its own: its task, its verdicts, its status and its exchanges."""
    conversation = await Conversation.create(store, connected(scripted()))
    await conversation.send("My ship is the Argo.")
    first = await refine(
        "What is my ship?", judge=lambda answer: "Argo" in answer, conversation=conversation
    )
    second = await refine(
        "What did I say first?", judge=lambda _: "Longer.", rounds=1, conversation=conversation
    )
    again = await Conversation.open(store, conversation.id, conversation.engine)
    third = await refine("What is 2+3?", judge=lambda answer: "5" in answer, conversation=again)
    for result, task, status in (
        (first, "What is my ship?", "passed"),
        (second, "What did I say first?", "failed"),
        (third, "What is 2+3?", "passed"),
    ):
        found = await load_workflow(store, result.workflow)
        assert (found.spec["task"], found.status) == (task, status)
        assert [each.passed for each in found.verdicts] == [status == "passed"]
        ((exchange,),) = [chain.exchanges for chain in found.chains]
        assert (exchange.question, exchange.answer) == (task, result.answer)
    listed = await list_workflows(store, kind="refine")
    assert [each.id for each in listed] == [third.workflow, second.workflow, first.workflow]
    resumed = await refine(
        "What is my ship?",
        judge=lambda answer: "Argo" in answer,
        conversation=conversation,
        workflow=first.workflow,
    )
    assert resumed.rounds[0].stored


async def test_watch_receives_every_event(store: Store, scripted: Any, connected: Any) -> None:
    """Started, asked, answered, judged and so on, in order."""
    seen: list[WorkflowEvent] = []
    await refine(
        "Please guess.",
        judge=guess_eight,
        store=store,
        engine=connected(scripted(*WARMER)),
        rounds=2,
        watch=seen.append,
    )
    one = [QuestionAsked, QuestionAnswered, AnswerJudged]
    assert [type(each) for each in seen] == [WorkflowStarted, *one, *one, WorkflowFinished]


async def test_a_workflow_that_is_over_is_not_run_again(
    store: Store, scripted: Any, connected: Any
) -> None:
    """With its id it gives the same result, and sends nothing."""
    server = scripted(*WARMER)
    engine = connected(server)
    first = await refine("Please guess.", judge=guess_eight, store=store, engine=engine)

    def never(answer: str) -> bool:
        raise AssertionError("judged again")

    again = await refine(
        "Please guess.", judge=never, store=store, engine=engine, workflow=first.workflow
    )
    assert len(server.requests) == 3
    assert again.answer == first.answer
    assert all(each.stored for each in again.rounds)


async def test_what_cannot_be_is_refused(store: Store, scripted: Any, connected: Any) -> None:
    """No rounds, nowhere to talk, or the id of another kind of workflow."""
    engine = connected(scripted())
    with pytest.raises(InvalidWorkflow, match="at least one round"):
        await refine("Hello", judge=bool, store=store, engine=engine, rounds=0)
    with pytest.raises(InvalidWorkflow, match="a store and an engine"):
        await refine("Hello", judge=bool, store=store)
    with pytest.raises(InvalidWorkflow, match="not a valid JSON schema"):
        await refine("Hello", judge={"type": "ship"}, store=store, engine=engine)
