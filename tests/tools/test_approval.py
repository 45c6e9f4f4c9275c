"""Tests of approvals: an approver allows, denies or edits a tool call before it runs."""

import logging
from typing import Any

import anyio
import pytest

from for_each import for_each
from kedge.tools import Allow, Deny, Edit, Toolbox, ToolRun, run_calls, tool
from kedge.turns import ToolCallBlock, image, tool_call


def delete(path: str) -> str:
    """Delete a file."""
    return f"deleted {path}"


async def run_call(
    approve: Any, function: Any = delete, arguments: Any = None, custom: bool = False
) -> ToolRun:
    toolbox = Toolbox(function)
    runs: list[ToolRun] = []
    call_arguments = {"path": "/tmp/a"} if arguments is None else arguments  # noqa: S108
    call = tool_call(next(iter(toolbox)), call_arguments, call_id="c1", custom=custom)
    await run_calls(toolbox, [call], approve=approve, on_run=runs.append)
    return runs[0]


@pytest.mark.parametrize("answer", [Allow(), True])
async def test_an_allowed_call_runs(answer: Any) -> None:
    """The approver receives the call, and a call that it allows runs."""
    calls: list[ToolCallBlock] = []

    def approve(call: ToolCallBlock) -> Any:
        calls.append(call)
        return answer

    done = await run_call(approve)
    assert (done.outcome, done.result.text) == ("ok", "deleted /tmp/a")
    assert [call.call_id for call in calls] == ["c1"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Deny("not that one"), "The call was denied and did not run: not that one"),
        (Deny(), "The call was denied and did not run."),
        (False, "The call was denied and did not run."),
    ],
)
async def test_a_rejected_call_does_not_run_and_reports_it(answer: Any, text: str) -> None:
    """The result of a denied call contains the approver's reason."""
    done = await run_call(lambda _: answer)
    assert (done.outcome, done.attempts, done.result.text) == ("refused", 0, text)


async def test_an_edited_call_runs_with_other_arguments() -> None:
    """The result states the changed arguments, and the call itself is not modified."""

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


async def test_an_edit_can_be_omitted_from_the_result() -> None:
    """An edit with ``tell=False`` is not mentioned in the result."""
    done = await run_call(lambda _: Edit('{"path": "/tmp/b"}', tell=False))
    assert done.result.text == "deleted /tmp/b"


async def test_free_text_can_be_edited() -> None:
    """The note about an edit is a separate part before an image."""

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
    ("approve", "reason"),
    [
        (BrokenApprover(), "the approver failed"),
        (lambda _: "yes", "the approver failed"),
        (lambda _: None, "the approver failed"),
        (lambda _: Edit({"path": object()}), "the approver's arguments are not JSON"),
        (lambda _: Edit({"paht": "x"}), "the approver's arguments are invalid"),
        (lambda _: Edit("{"), "the approver's arguments are invalid"),
    ],
)
async def test_a_failing_approver_does_not_approve(
    approve: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the approver fails, the call does not run and the error is logged without its message."""
    done = await run_call(approve)
    assert (done.outcome, done.attempts) == ("refused", 0)
    assert done.result.text == f"The call was not approved and did not run: {reason}."
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert error.getMessage().startswith(f"{reason} (call c1): ")
    assert "hush" not in caplog.text


async def test_no_approval_is_requested_for_a_call_that_cannot_run() -> None:
    """Calls with invalid arguments and calls of unknown tools are answered without an approval."""

    def approve(call: ToolCallBlock) -> bool:
        raise AssertionError

    assert (await run_call(approve, arguments={})).outcome == "invalid"
    (result,) = await run_calls(Toolbox(), [tool_call("x", {})], approve=approve)
    assert result.metadata["kedge.outcome"] == "unknown"


@for_each(
    ("approval", "has_approver", "outcome"),
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
    approval: bool | None, has_approver: bool, outcome: str
) -> None:
    """True requires an approver, False never asks it, and None asks it if there is one."""
    approve = (lambda _: False) if has_approver else None  # pyright: ignore[reportUnknownLambdaType]
    done = await run_call(approve, tool(delete, approval=approval))
    assert done.outcome == outcome
    if approval and not has_approver:
        assert done.result.text == "delete requires approval, and no approver is configured."


async def test_approvals_are_requested_one_at_a_time() -> None:
    """The approver gets one call at a time, and calls that need no approval do not wait for it."""
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
        calls = [tool_call(name, {}, call_id=f"c{i}") for i, name in enumerate(names)]
        await run_calls(
            Toolbox(ask, go), calls, approve=approve, on_run=lambda run: ran.append(run.call_id)
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


async def test_a_call_cancelled_during_its_approval_does_not_run() -> None:
    """A call that is cancelled during its approval gets a result that says it did not run."""
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
