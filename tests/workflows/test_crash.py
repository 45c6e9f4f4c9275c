"""Workflows that die go on where they stood, and the server proves that nothing was paid for twice."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.store import open_store
from kedge.workflows import load_workflow
from workflows import crash_process

SCRIPT = Path(crash_process.__file__)


class Crash(BaseException):
    """Nothing that anybody would catch."""


def crash() -> None:
    raise Crash


def run_killed(kind: str, url: str, how: str, at: int, servers: list[str]) -> None:
    """Run a workflow in a process that dies on the way."""
    command = [sys.executable, str(SCRIPT), kind, url, how, str(at), *servers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


async def count_answers(url: str) -> int:
    """How many answers are in the store."""
    async with await open_store(url) as store:
        return len([row for row in await store.responses() if row.status == "completed"])


@pytest.mark.parametrize("kind", ["refine", "debate", "steps"])
async def test_workflow_resumes_from_every_event(kind: str, scripted: Any, tmp_path: Path) -> None:
    """Interrupted again and again, one event later each time, no answer is paid for again.

    Only in a debate may there be a request of somebody else under way, which then dies with it.
    """
    url = f"sqlite:///{tmp_path}/store.db"
    server = scripted(*crash_process.ANSWERS)
    crashes = lost = 0
    for at in range(1, 40):
        try:
            result = await crash_process.run_workflow(
                kind, url, [server.base_url], watch=crash_process.kill_at_event(at, crash)
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
    assert result == await crash_process.run_workflow(kind, url, [server.base_url])
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind] + lost


@pytest.mark.parametrize(("kind", "at"), [("refine", 6), ("debate", 5)])
async def test_a_killed_process_is_succeeded_by_another(
    kind: str, at: int, scripted: Any, tmp_path: Path
) -> None:
    """A kill -9 between two steps: the next process pays for what is left, and for nothing else."""
    url = f"sqlite:///{tmp_path}/store.db"
    server = scripted(*crash_process.ANSWERS)
    run_killed(kind, url, "event", at, [server.base_url])
    before = len(server.requests)
    assert before < crash_process.EXPECTED_REQUESTS[kind]
    await crash_process.run_workflow(kind, url, [server.base_url])
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind]
    async with await open_store(url) as store:
        assert (await load_workflow(store, "wf_crash")).status != "running"


@pytest.mark.parametrize(("kind", "at"), [("refine", 2), ("steps", 2)])
async def test_an_answer_that_died_on_the_way_is_asked_for_once_more(
    kind: str, at: int, scripted: Any, tmp_path: Path
) -> None:
    """A kill -9 inside a step: of all answers only the one that was never saved is paid for again."""
    url = f"sqlite:///{tmp_path}/store.db"
    server = scripted(*crash_process.ANSWERS)
    run_killed(kind, url, "answer", at, [server.base_url])
    assert len(server.requests) == await count_answers(url) + 1
    await crash_process.run_workflow(kind, url, [server.base_url])
    assert len(server.requests) == crash_process.EXPECTED_REQUESTS[kind] + 1
    assert await count_answers(url) == crash_process.EXPECTED_REQUESTS[kind]
