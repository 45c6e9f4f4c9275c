"""Tests of ``run_calls``: every tool call is approved if necessary, run, and gets exactly one result."""

import contextvars
import logging
import threading
from functools import partial
from typing import Annotated, Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator

from for_each import for_each
from kedge.errors import ToolFailed, UnknownTool
from kedge.tools import Deny, Edit, Toolbox, ToolRun, run_calls, tool
from kedge.turns import ImagePart, TextPart, ToolCallBlock, image, tool_call
from tools.runs import make_calls, run_call

WHO = contextvars.ContextVar("who", default="nobody")


async def run_one(function: Any, **arguments: Any) -> ToolRun:
    """Run one call and return its record."""
    toolbox = Toolbox(function)
    return await run_call(toolbox, *make_calls(*toolbox, **arguments))


async def test_sync_functions_run_concurrently_in_threads() -> None:
    """Two sync functions wait for each other in separate threads and see the caller's context variables."""
    barrier = threading.Barrier(2, timeout=300)
    event_loop_thread = threading.get_ident()

    def meet() -> str:
        barrier.wait()
        assert threading.get_ident() != event_loop_thread
        return WHO.get()

    WHO.set("somebody")
    results = await run_calls(Toolbox(meet), make_calls("meet", "meet"))
    assert [result.text for result in results] == ["somebody", "somebody"]


async def test_a_sync_function_may_return_an_awaitable() -> None:
    """The coroutine that a sync function returns is awaited."""

    async def later() -> str:
        return "here"

    def sooner() -> Any:
        return later()

    assert (await run_one(sooner)).result.text == "here"


async def test_a_result_has_the_call_id_kind_and_origin_of_its_call() -> None:
    """A result has the call id, kind and origin of its call, and the outcome in its metadata."""

    @tool(custom=True)
    def shout(text: str) -> list[Any]:
        return [text.upper(), image("https://kedge.example/a.png")]

    call = tool_call("shout", "hey", call_id="c9", custom=True)
    (result,) = await run_calls(Toolbox(shout), [call], origin="my tools")
    assert (result.call_id, result.custom, result.origin) == ("c9", True, "my tools")
    assert result.metadata == {"kedge.outcome": "ok"}
    assert result.parts == (TextPart("HEY"), ImagePart("https://kedge.example/a.png"))


async def test_invalid_arguments_are_answered_with_their_problems() -> None:
    """The function is not called, and the result lists the problems of the arguments."""

    def add(a: int, b: int) -> int:
        raise AssertionError

    run = await run_one(add, a=1)
    assert (run.outcome, run.attempts) == ("invalid", 0)
    problem = '- b: it is required and missing; expected {"type": "integer"}'
    parts = ("The arguments of add are invalid:", problem, "Correct them and call it again.")
    assert run.result.text == "\n".join(parts)


@for_each("custom", [True, False])
async def test_free_text_and_json_are_distinguished(custom: bool) -> None:
    """A custom call of a function tool, and a JSON call of a custom tool, are answered as invalid."""

    def shout(text: str) -> str:
        raise AssertionError

    call = tool_call("shout", '{"text": ""}', custom=not custom)
    run = await run_call(Toolbox(tool(shout, custom=custom)), call)
    expected = "free text, as a custom tool call" if custom else "JSON arguments"
    assert (run.outcome, run.result.text) == ("invalid", f"shout expects {expected}.")


async def test_an_exception_is_reported_without_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The result has the type and redacted message; the log has the type and the source line."""

    async def fetch(url: str) -> str:
        raise ConnectionError(f"no way to {url}")

    with caplog.at_level(logging.DEBUG, "kedge.tools"):
        run = await run_one(fetch, url="https://me:hunter2@kedge.example")
    assert run.result.text == (
        "fetch failed: ConnectionError: no way to https://[redacted]@kedge.example"
    )
    assert run.outcome == "failed"
    assert isinstance(run.error, ConnectionError)
    assert "ConnectionError at test_execute.py:" in caplog.text
    assert "hunter2" not in caplog.text
    assert "Traceback" not in caplog.text


class Odd:
    def __str__(self) -> str:
        raise ValueError("no words")


@for_each(
    ("error", "text"),
    [
        (ToolFailed("All seats are taken."), "All seats are taken."),
        (
            UnknownTool("x", []),
            "book failed: UnknownTool: there is no tool 'x'. There are no tools.",
        ),
        (ValueError("half \ud800 pair"), "book failed: ValueError: half \ufffd pair"),
        (Odd(), "book failed: ValueError: no words"),
    ],
)
async def test_an_error_of_a_tool_is_its_result(error: Any, text: str) -> None:
    """It is not retried by default, or if it is ``ToolFailed``; also an error of Kedge, or of ``__str__``."""

    @tool(retries=3 if isinstance(error, ToolFailed) else 0)
    def book() -> Any:
        if isinstance(error, Exception):
            raise error
        return error

    run = await run_one(book)
    assert (run.outcome, run.attempts, run.result.text) == ("failed", 1, text)


async def test_failed_calls_are_retried() -> None:
    """A failing call is retried up to ``retries`` times, each time with newly parsed arguments of its approver."""
    lists: list[list[int]] = []

    @tool(retries=2, retry_wait=0)
    async def flaky(numbers: list[int]) -> str:
        lists.append(list(numbers))
        numbers.clear()
        if len(lists) < 3:
            raise OSError("not yet")
        return "now"

    edit = Edit({"numbers": [1, 2]}, tell=False)
    run = await run_approved(lambda _: edit, flaky, numbers=[9])
    assert (run.outcome, run.attempts, run.result.text) == ("ok", 3, "now")
    assert lists == [[1, 2]] * 3


@for_each(("error", "expected"), [(OSError("busy"), [1, 2, 4]), (ValueError("never"), [])])
async def test_only_exceptions_in_retry_on_are_retried(
    error: Exception, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pause is twice as long as the one before, and after the last retry the call has failed."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("kedge.tools.run.anyio.sleep", pause)

    @tool(retries=3, retry_wait=1, retry_on=(OSError,))
    def broken() -> None:
        raise error

    run = await run_one(broken)
    assert (run.outcome, run.attempts, pauses) == ("failed", 1 + len(expected), expected)


async def test_a_record_has_outcome_attempts_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running and waiting times are measured separately; ``repr`` has neither arguments nor output."""
    now = [0.0]
    monkeypatch.setattr("kedge.tools.run.time.perf_counter", lambda: now[0])

    def secret(word: str) -> str:
        now[0] += 2.0
        return word

    def approve(call: ToolCallBlock) -> bool:
        now[0] += 3.0
        return True

    call = tool_call("secret", {"word": "hush"}, call_id="c0")
    run = await run_call(Toolbox(secret), call, approve=approve)
    assert (run.call_id, run.name, run.outcome, run.attempts) == ("c0", "secret", "ok", 1)
    assert (run.seconds, run.waited) == (2.0, 3.0)
    assert run.edited is None
    assert "hush" not in repr(run)


async def test_a_validator_that_breaks_is_a_failure() -> None:
    """An exception raised by a validator of an argument is reported as a failure of the tool."""

    def explode(value: int) -> int:
        raise RuntimeError("boom")

    def f(x: Annotated[int, AfterValidator(explode)]) -> None: ...

    run = await run_one(f, x=1)
    assert (run.outcome, run.result.text) == ("failed", "f failed: RuntimeError: boom")


async def test_an_exception_of_a_callback_is_raised_unchanged() -> None:
    """An exception raised by ``on_run`` is not wrapped in an exception group."""

    def f() -> None: ...

    def bad(run: ToolRun) -> None:
        raise ValueError("my own fault")

    with pytest.raises(ValueError, match="my own fault"):
        await run_calls(Toolbox(f), make_calls("f"), on_run=bad)


async def _fine(x: int = 0) -> int:
    return x


def _bad(x: int = 0) -> int:
    raise ValueError(str(x))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["_fine", "_bad", "_none"]),
            st.sampled_from(["{}", '{"x": 1}', '{"x": "?"}', "", "["]),
        ),
        max_size=8,
    )
)
async def test_every_call_gets_one_result(requested: list[tuple[str, str]]) -> None:
    """For random calls there is one result for each call, with its id and in its order."""
    calls = [tool_call(name, text, call_id=f"c{i}") for i, (name, text) in enumerate(requested)]
    delivered: list[str] = []
    results = await run_calls(
        Toolbox(_fine, _bad), calls, on_run=lambda run: delivered.append(run.call_id)
    )
    assert [result.call_id for result in results] == [call.call_id for call in calls]
    assert sorted(delivered) == sorted(call.call_id for call in calls)


def delete(path: str) -> str:
    """Delete a file."""
    return f"deleted {path}"


class Rules(list[str]):
    """An approver with a length; it allows nothing."""

    def __call__(self, call: ToolCallBlock) -> bool:
        return call.name in self


async def run_approved(approve: Any, function: Any = delete, **arguments: Any) -> ToolRun:
    """Run a call whose approver is given."""
    toolbox = Toolbox(function)
    call = tool_call(next(iter(toolbox)), arguments or {"path": "a"}, call_id="c1")
    return await run_call(toolbox, call, approve=approve)


@for_each(
    ("answer", "text"),
    [
        (Deny("not that one"), "The call was denied and did not run: not that one"),
        (Deny(), "The call was denied and did not run."),
        (False, "The call was denied and did not run."),
    ],
)
async def test_a_rejected_call_does_not_run_and_reports_it(answer: Any, text: str) -> None:
    """The result of a denied call contains the approver's reason."""
    done = await run_approved(lambda _: answer)
    assert (done.outcome, done.attempts, done.result.text) == ("refused", 0, text)


async def test_an_edited_call_runs_with_other_arguments() -> None:
    """The result states the changed arguments, except with ``tell=False``; the call is not modified."""

    async def approve(call: ToolCallBlock) -> Edit:
        return Edit({"path": "b"})

    done = await run_approved(approve)
    note = '[The arguments were changed before the call ran, to: {"path": "b"}]\n'
    assert (done.outcome, done.result.text) == ("ok", f"{note}deleted b")
    assert done.call.arguments == '{"path": "a"}'
    assert done.edited is not None
    assert (done.edited.arguments, done.edited.call_id) == ('{"path": "b"}', "c1")
    untold = await run_approved(lambda _: Edit('{"path": "b"}', tell=False))
    assert untold.result.text == "deleted b"


async def test_free_text_can_be_edited() -> None:
    """The note about an edit is a separate part before an image."""

    @tool(custom=True)
    def draw(text: str) -> Any:
        return image(f"https://kedge.example/{text}.png")

    call = tool_call("draw", "cat", custom=True)
    done = await run_call(Toolbox(draw), call, approve=lambda _: Edit("dog"))
    assert done.result.parts[1] == image("https://kedge.example/dog.png")
    assert done.result.text == "[The arguments were changed before the call ran, to: dog]"


async def test_an_approver_without_rules_is_asked() -> None:
    """An approver may be an object that counts as false, such as an empty list."""
    assert (await run_approved(Rules())).outcome == "refused"


def approve_badly(call: ToolCallBlock) -> Any:
    raise RuntimeError("hush")


@for_each(
    ("approve", "reason"),
    [
        (approve_badly, "the approver failed"),
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
    caplog.clear()
    done = await run_approved(approve)
    assert (done.outcome, done.attempts) == ("refused", 0)
    assert done.result.text == f"The call was not approved and did not run: {reason}."
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert error.getMessage().startswith(f"{reason} (call c1): ")
    assert "hush" not in caplog.text


async def test_no_approval_is_requested_for_a_call_that_cannot_run() -> None:
    """Calls with invalid arguments and calls of unknown tools are answered without an approval."""

    def approve(call: ToolCallBlock) -> bool:
        raise AssertionError

    for name, outcome in (("delete", "invalid"), ("dleete", "unknown")):
        run = await run_call(Toolbox(delete), tool_call(name, {}), approve=approve)
        assert (run.outcome, run.attempts) == (outcome, 0)
    assert "did you mean delete? The tools are: delete." in run.result.text


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
    done = await run_approved(approve, tool(delete, approval=approval))
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

    calls = make_calls("ask", "ask", "go")
    run = partial(
        run_calls, Toolbox(ask, go), calls, approve=approve, on_run=lambda r: ran.append(r.call_id)
    )

    with anyio.fail_after(300):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
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

    calls = make_calls("delete", path="x")
    async with anyio.create_task_group() as group:
        group.start_soon(
            partial(run_calls, Toolbox(delete), calls, approve=approve, on_run=runs.append)
        )
        await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert runs[0].result.text == "This call was cancelled before it ran."
