"""Before a call runs somebody may look at it: allow, refuse or edit."""

import logging
from typing import Any

import anyio
import pytest

from kedge.tools import Allow, Deny, Edit, Toolbox, ToolRun, run_calls, tool
from kedge.turns import ToolCallBlock, image, tool_call


def delete(path: str) -> str:
    """Delete a file."""
    return f"deleted {path}"


async def run_call(
    approve: Any, function: Any = delete, arguments: Any = None, custom: bool = False
) -> ToolRun:
    box = Toolbox(function)
    runs: list[ToolRun] = []
    given = {"path": "/tmp/a"} if arguments is None else arguments  # noqa: S108
    call = tool_call(next(iter(box)), given, call_id="c1", custom=custom)
    await run_calls(box, [call], approve=approve, on_run=runs.append)
    return runs[0]


@pytest.mark.parametrize("answer", [Allow(), True])
async def test_an_allowed_call_runs(answer: Any) -> None:
    """The approver sees the call."""
    seen: list[ToolCallBlock] = []

    def approve(call: ToolCallBlock) -> Any:
        seen.append(call)
        return answer

    done = await run_call(approve)
    assert (done.outcome, done.result.text) == ("ok", "deleted /tmp/a")
    assert [call.call_id for call in seen] == ["c1"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Deny("not that one"), "The call was denied and did not run: not that one"),
        (Deny(), "The call was denied and did not run."),
        (False, "The call was denied and did not run."),
    ],
)
async def test_a_rejected_call_does_not_run_and_reports_it(answer: Any, text: str) -> None:
    """The model learns the reason."""
    done = await run_call(lambda _: answer)
    assert (done.outcome, done.attempts, done.result.text) == ("refused", 0, text)


async def test_an_edited_call_runs_with_other_arguments() -> None:
    """The model is told, for otherwise it would wonder; the call itself is not touched."""

    async def approve(call: ToolCallBlock) -> Edit:
        return Edit({"path": "/tmp/b"})  # noqa: S108

    done = await run_call(approve)
    assert done.outcome == "ok"
    assert done.result.text == (
        '[The arguments were changed before the call ran, to: {"path": "/tmp/b"}]\ndeleted /tmp/b'
    )
    assert done.call.arguments == '{"path": "/tmp/a"}'
    assert done.edited is not None
    assert done.edited.arguments == '{"path": "/tmp/b"}'
    assert done.edited.call_id == "c1"


async def test_an_edit_may_be_silent() -> None:
    """``tell=False`` keeps it between the approver and the tool."""
    done = await run_call(lambda _: Edit('{"path": "/tmp/b"}', tell=False))
    assert done.result.text == "deleted /tmp/b"


async def test_free_text_may_be_edited_too() -> None:
    """A note before a picture is a part of its own."""

    @tool(custom=True)
    def draw(text: str) -> Any:
        return image(f"https://kedge.example/{text}.png")

    done = await run_call(lambda _: Edit("dog"), draw, "cat", custom=True)
    assert done.result.parts[1] == image("https://kedge.example/dog.png")
    assert done.result.text == "[The arguments were changed before the call ran, to: dog]"


class BrokenApprover:
    def __call__(self, call: ToolCallBlock) -> Any:
        raise RuntimeError("hush")


@pytest.mark.parametrize(
    ("approve", "why"),
    [
        (BrokenApprover(), "the approver failed"),
        (lambda _: "yes", "the approver failed"),
        (lambda _: None, "the approver failed"),
        (lambda _: Edit({"path": object()}), "the approver's arguments are not JSON"),
        (lambda _: Edit({"paht": "x"}), "the approver's arguments are invalid"),
        (lambda _: Edit("{"), "the approver's arguments are invalid"),
    ],
)
async def test_an_approver_that_fails_has_not_approved(
    approve: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The call does not run, and whoever reads the log learns it."""
    done = await run_call(approve)
    assert (done.outcome, done.attempts) == ("refused", 0)
    assert done.result.text == f"The call was not approved and did not run: {why}."
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert error.getMessage().startswith(f"{why} (call c1): ")
    assert "hush" not in caplog.text


async def test_no_approval_is_requested_for_a_call_that_cannot_run() -> None:
    """Wrong arguments and unknown tools are answered without bothering anyone."""

    def approve(call: ToolCallBlock) -> bool:
        raise AssertionError

    assert (await run_call(approve, arguments={})).outcome == "invalid"
    (result,) = await run_calls(Toolbox(), [tool_call("x", {})], approve=approve)
    assert result.metadata["outcome"] == "unknown"


@pytest.mark.parametrize(
    ("approval", "asked", "outcome"),
    [
        (None, True, "refused"),
        (True, True, "refused"),
        (False, True, "ok"),
        (None, False, "ok"),
        (True, False, "refused"),
        (False, False, "ok"),
    ],
)
async def test_a_tool_has_its_approval_requirement(
    approval: bool | None, asked: bool, outcome: str
) -> None:
    """True never runs unapproved, False is never asked about, None asks if there is who to ask."""
    approve = (lambda _: False) if asked else None  # pyright: ignore[reportUnknownLambdaType]
    done = await run_call(approve, tool(delete, approval=approval))
    assert done.outcome == outcome
    if approval and not asked:
        assert done.result.text == "delete requires approval, and no approver is configured."


async def test_one_question_at_a_time_while_others_run() -> None:
    """A person is asked about one call, then the next; what needs no answer does not wait."""
    answers = {"c0": anyio.Event(), "c1": anyio.Event()}
    requested: list[str] = []
    ran: list[str] = []

    @tool(approval=True)
    async def ask() -> None: ...

    @tool(approval=False)
    async def go() -> None: ...

    async def approve(call: ToolCallBlock) -> bool:
        requested.append(call.call_id)
        await answers[call.call_id].wait()
        return True

    async def main() -> None:
        names = ("ask", "ask", "go")
        some = [tool_call(name, {}, call_id=f"c{i}") for i, name in enumerate(names)]
        await run_calls(
            Toolbox(ask, go), some, approve=approve, on_run=lambda run: ran.append(run.call_id)
        )

    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            group.start_soon(main)
            await anyio.wait_all_tasks_blocked()
            assert (requested, ran) == (["c0"], ["c2"])
            answers["c0"].set()
            await anyio.wait_all_tasks_blocked()
            assert (requested, ran) == (["c0", "c1"], ["c2", "c0"])
            answers["c1"].set()
    assert ran == ["c2", "c0", "c1"]


async def test_cancelled_while_being_asked_about_means_it_never_ran() -> None:
    """The call is answered all the same."""
    runs: list[ToolRun] = []

    async def approve(call: ToolCallBlock) -> bool:
        await anyio.sleep_forever()
        return True

    async def main() -> None:
        call = tool_call("delete", {"path": "x"})
        await run_calls(Toolbox(delete), [call], approve=approve, on_run=runs.append)

    async with anyio.create_task_group() as group:
        group.start_soon(main)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert runs[0].result.text == "This call was cancelled before it ran."
