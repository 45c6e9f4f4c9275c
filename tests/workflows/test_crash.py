"""Interrupted workflows continue from their last stored step, without repeating answered requests."""

import signal
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked
from kedge.store import open_store
from workflows import crash_process

SCRIPT = Path(crash_process.__file__)


class Crash(BaseException):
    """An exception that is not caught by the code under test."""


def crash() -> None:
    raise Crash


async def count_answers(url: str) -> int:
    """Return the number of completed answers in the store."""
    async with open_store(url) as store:
        return len([row for row in await store.responses() if row.status == "completed"])


@pytest.mark.parametrize("kind", ["refine", "debate", "steps"])
async def test_workflow_resumes_from_every_event(kind: str, scripted: Any, tmp_path: Path) -> None:
    """A workflow interrupted at every event repeats no stored answer.

    Only in a debate may requests of other sides be in progress, which are lost.
    """
    url = f"sqlite:///{tmp_path}/store.db"
    server = scripted(*crash_process.ANSWERS)
    crashes = lost = 0
    for at in range(1, 40):
        try:
            result = await crash_process.run_workflow(
                kind, url, server.base_url, on_event=crash_process.crash_at_event(at, crash)
            )
            break
        except (Crash, BaseExceptionGroup):
            crashes += 1
            lost = len(server.requests) - await count_answers(url)
    else:
        pytest.fail("it never came to its end")
    assert crashes > crash_process.EXPECTED_REQUESTS[kind] * 2
    assert lost <= (2 if kind == "debate" else 0)
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind] + lost
    assert result == await crash_process.run_workflow(kind, url, server.base_url)
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind] + lost


@pytest.mark.parametrize("kind", ["refine", "steps"])
async def test_unsaved_answer_is_repeated(kind: str, scripted: Any, tmp_path: Path) -> None:
    """After SIGKILL within a step, only the answer that was not stored is requested again."""
    url = f"sqlite:///{tmp_path}/store.db"
    server = scripted(*crash_process.ANSWERS)
    done = run_forked(str(SCRIPT), kind, url, "2", server.base_url)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(server.requests) == await count_answers(url) + 1
    await crash_process.run_workflow(kind, url, server.base_url)
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind] + 1
    assert await count_answers(url) == crash_process.EXPECTED_REQUESTS[kind]
