"""Tests of batches: every line is completed once, and an interrupted batch continues without repeating work."""

import errno
import json
import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from for_each import for_each
from forked import ForkedProcess
from kedge.batch import (
    AsyncioRunner,
    BatchJob,
    BatchLine,
    LineResult,
    Progress,
    ResultsFile,
    run_batch,
)
from kedge.batch.files import read_lines, summarize_results
from kedge.errors import InvalidBatch, InvalidSetting
from kedge.store import open_store
from kedge.testing import TestServer


@pytest.fixture
def batch(server: TestServer, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a batch."""
    return {
        "out": tmp_path / "results.jsonl",
        "store_url": f"sqlite:///{tmp_path}/store.db",
        "model": f"responses:{server.base_url}#practice",
    }


def write_prompts(tmp_path: Path, *lines: object) -> Path:
    """Write a file of lines and return its path."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in lines))
    return file


def read_results(batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results in the file, by id."""
    lines = batch["out"].read_text().splitlines()
    return {each["id"]: each for each in map(json.loads, lines)}


async def test_every_line_is_a_conversation(
    batch: dict[str, Any], server: TestServer, tmp_path: Path
) -> None:
    """A line has one or several turns, its own instructions, and parameters that override those of the batch."""
    file = write_prompts(
        tmp_path,
        {"id": "one", "prompt": "What is 2 + 3?"},
        {"id": "two", "prompts": ["My ship is the Argo.", "What is my ship?"]},
        {"prompt": "What are your instructions?", "system": "Be kind."},
        {"id": "four", "prompt": "Hi", "params": {"metadata": {"a": "b"}}},
    )
    summary = await run_batch(file, **batch)
    assert (summary.total, summary.completed, summary.failed) == (4, 4, 0)
    results = read_results(batch)
    assert results["one"]["answers"] == ["2 + 3 = 5."]
    assert results["two"]["answers"][1] == "Your ship is the Argo."
    (last,) = [each for each in server.requests if "What is my ship?" in str(each.body)]
    assert results["two"]["provider_response_id"] == last.response_id
    assert results["3"]["answers"] == ['My instructions are: "Be kind."']
    assert results["two"]["input_tokens"] > 0
    assert summary.output_tokens == sum(each["output_tokens"] for each in results.values())
    assert {"a": "b"} in [each.body.get("metadata") for each in server.requests]
    async with open_store(batch["store_url"]) as store:
        assert len(await store.conversations(tag="batch")) == 4
        assert (await store.conversation(results["two"]["conversation"])).data["batch"][
            "line"
        ] == "two"
    file = write_prompts(tmp_path, {"prompt": "Hi", "params": {"temperature": 0.5}})
    await run_batch(
        file, **{**batch, "out": tmp_path / "own.jsonl"}, params={"temperature": 1.0, "top_p": 0.9}
    )
    sent = server.requests[-1].body
    assert (sent["temperature"], sent["top_p"]) == (0.5, 0.9)


def test_a_line_without_an_answer_has_no_price_to_miss() -> None:
    """Only lines that have answers and no known price are counted as such."""
    results = [
        LineResult("failed", "failed", error="no", error_class="ServerFailed"),
        LineResult("answered", "completed", answers=("Hello.",)),
        LineResult("priced", "completed", answers=("Hello.",), cost=0.5),
    ]
    summary = summarize_results(results, total=3, skipped=0, seconds=1.0)
    assert (summary.unpriced, summary.cost) == (1, 0.5)


async def test_a_line_in_the_background_is_waited_for(
    batch: dict[str, Any], server: TestServer, tmp_path: Path
) -> None:
    """The result of a line is its answer, also if the server generates it in the background and after a call."""

    def look_up() -> str:
        return "found"

    prompts = ["Say: One.", "Say: Two.", "Call look_up with {}"]
    lines = {"id": "a", "prompts": prompts, "params": {"background": True}}
    runner = AsyncioRunner(tools=[look_up])
    await run_batch(write_prompts(tmp_path, lines), **batch, runner=runner)
    *said, last = read_results(batch)["a"]["answers"]
    assert said == ["One.", "Two."]
    assert "found" in last
    posted = [each for each in server.requests if each.method == "POST"]
    assert len(posted) == 4


async def test_lost_results_are_read_from_the_store(
    batch: dict[str, Any], server: TestServer, tmp_path: Path
) -> None:
    """Answers missing from the results file are not requested again, and a partial line is repaired."""
    file = write_prompts(tmp_path, *({"id": str(i), "prompts": ["One", "Two"]} for i in range(5)))
    await run_batch(file, **batch)
    complete = batch["out"].read_bytes()
    batch["out"].write_bytes(complete[: len(complete) * 3 // 5])
    summary = await run_batch(file, **batch)
    assert summary.completed + summary.skipped == 5
    assert 0 < summary.skipped < 5
    assert len(server.requests) == 10
    assert sorted(read_results(batch)) == ["0", "1", "2", "3", "4"]


async def test_changed_prompt_is_rejected(batch: dict[str, Any], server: TestServer) -> None:
    """A line with the same id and another prompt is rejected, because the stored answer would be wrong."""
    server.faults.set("status=400", times=1)
    await run_batch([BatchLine("a", ("What is 2 + 3?",))], **batch)
    await run_batch([BatchLine("a", ("What is 5 + 5?",))], **batch)
    assert "give the line a new id" in read_results(batch)["a"]["error"]
    assert len(server.requests) == 1
    with pytest.raises(InvalidBatch, match="same id"):
        await run_batch([BatchLine("a", ("One",)), BatchLine("a", ("Two",))], **batch)


async def test_prompts_may_have_what_titles_may_not(batch: dict[str, Any]) -> None:
    """The title of a line's conversation does not decide whether its prompt is valid."""
    await run_batch([BatchLine("nul", ("a\0b",)), BatchLine("lone", ("a\ud800b",))], **batch)
    results = read_results(batch)
    assert results["nul"]["status"] == "completed"
    assert results["lone"]["error"] == "text: lone surrogate at character 1"


async def test_result_is_for_one_request(batch: dict[str, Any], server: TestServer) -> None:
    """A line with other prompts, instructions, params or model is neither skipped nor sent."""
    line = BatchLine("a", ("What is 2 + 3?",))
    await run_batch([line], **batch)
    json_format = {"text": {"format": {"type": "json_object"}}}
    changes: list[dict[str, Any]] = [
        *({"prompts": ("What is 5 + 5?",)}, {"system": "Be brief."}, {"model": "practice"}),
        *({"params": {"temperature": 0}}, {"params": json_format}),
    ]
    other = {**batch, "model": "practice"}
    for changed, used in [*((each, batch) for each in changes), ({}, other)]:
        summary = await run_batch([replace(line, **changed)], **used)
        assert (summary.skipped, summary.failed, summary.errors) == (0, 1, {"KeyReused": 1})
        assert "give the line a new id" in read_results(batch)["a"]["error"]
        assert len(server.requests) == 1
    repeated = await run_batch([line], **batch)
    assert (repeated.completed, len(server.requests)) == (1, 1)


async def test_a_failed_line_runs_again(batch: dict[str, Any], server: TestServer) -> None:
    """A later run sends a line whose result is an error, and the later result counts."""
    server.faults.set("status=400", times=1)
    for failed in (1, 0):
        summary = await run_batch([BatchLine("a", ("What is 2 + 3?",))], **batch)
        assert (summary.failed, summary.completed, summary.skipped) == (failed, 1 - failed, 0)
    assert read_results(batch)["a"]["answers"] == ["2 + 3 = 5."]


async def test_failure_after_a_tool_is_retried(batch: dict[str, Any], server: TestServer) -> None:
    """Attempts belong to requests: a failure after a tool call is retried, and the tool does not run again."""
    calls = 0

    def look_up() -> str:
        nonlocal calls
        calls += 1
        # The engine itself sends three times.
        server.faults.set("status=429,retry_after=0", times=4)
        return "found"

    lines = [BatchLine("a", ("Call look_up with {}",))]
    summary = await run_batch(lines, **batch, runner=AsyncioRunner(tools=[look_up]))
    assert (summary.completed, calls) == (1, 1)


async def test_concurrency_is_limited(batch: dict[str, Any], server: TestServer) -> None:
    """The number of concurrent requests is limited, and every step is reported."""
    maximum = 0
    events: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        nonlocal maximum
        events.append(progress)
        maximum = max(maximum, server.running)

    lines = [BatchLine(str(i), ("Slowly count to 3",)) for i in range(30)]
    await run_batch(lines, **batch, concurrency=4, on_progress=on_progress)
    assert maximum <= 4
    assert [each.done for each in events] == list(range(31))
    assert events[-1].completed == 30


INVALID_LINES = [
    ("{", "line 1 of prompts.jsonl is not valid JSON"),
    ("[]", "must be a JSON object"),
    ('{"id": "a"}', "needs either a prompt or prompts"),
    ('{"prompts": []}', "one or more"),
    ('{"prompts": ["a", ""]}', "not empty"),
    ('{"prompt": "a", "promt": 1}', "unknown member 'promt'"),
    ('{"prompt": "a", "id": ""}', "id must be a text"),
    ('{"prompt": "a", "params": {"key": "k"}}', "has 'key', which is not a request parameter"),
    ('{"prompt": "a", "params": {"ephemeral": 5}}', "params.ephemeral must be a text or a list"),
    ('{"prompt": "a", "params": {"top_p": NaN}}', "line 1 of prompts.jsonl: params.top_p: nan is"),
    ('{"prompt": "a", "params": 0}', "line 1 of prompts.jsonl: params must be an object"),
    ('{"prompt": "a", "params": []}', "line 1 of prompts.jsonl: params must be an object"),
    (
        '{"prompt": "a", "schema": {"title": "\\ud800"}}',
        "line 1 of prompts.jsonl: schema: $.title: lone surrogate",
    ),
    ("[" * 200_000, "line 1 of prompts.jsonl is not valid JSON"),
    ('{"prompt": "a", "id": "\\ud800"}', "id contains a lone surrogate"),
    ('{"prompt": "a", "id": "1"}\n{"prompt": "b", "id": 1}', "has the same id '1' as line 1"),
]


async def test_invalid_line_is_reported_before_sending(
    batch: dict[str, Any], server: TestServer, tmp_path: Path
) -> None:
    """The error has the number of the line and the problem."""
    file = tmp_path / "prompts.jsonl"
    for text, message in INVALID_LINES:
        file.write_text(text)
        with pytest.raises(InvalidBatch) as exc_info:
            await run_batch(file, **batch)
        assert message in str(exc_info.value)
    assert not server.requests


@for_each("prompts", ["Hi", (), ("Hi", ""), (5,)])
def test_line_of_a_program_is_checked_like_one_of_a_file(prompts: Any) -> None:
    """Above all a single text is not a list of prompts of one letter each."""
    with pytest.raises(InvalidBatch, match="line 'a': prompts must be a list of one or more texts"):
        BatchLine("a", prompts)


async def test_invalid_arguments_create_no_results(batch: dict[str, Any]) -> None:
    """Lines that were not parsed, and a lease that no line can use, are reported once, and not for each line."""
    lines: Any = [{"id": "a", "prompt": "Hi"}]
    with pytest.raises(InvalidBatch, match="a list of BatchLine"):
        await run_batch(lines, **batch)
    with pytest.raises(InvalidSetting, match="lease must be"):
        await run_batch([BatchLine("a", ("Hi",))], **batch, lease=0)
    assert not batch["out"].exists()


async def test_unusable_files_are_reported(batch: dict[str, Any], tmp_path: Path) -> None:
    """A missing file and a folder are reported."""
    with pytest.raises(InvalidBatch, match="cannot be read"):
        await run_batch(tmp_path / "none.jsonl", **batch)
    with pytest.raises(InvalidBatch, match="cannot be written"):
        await run_batch([BatchLine("a", ("Hi",))], tmp_path, store_url=batch["store_url"])
    with pytest.raises(InvalidBatch, match="is not a regular file"):
        await run_batch([BatchLine("a", ("Hi",))], os.devnull, store_url=batch["store_url"])


@pytest.mark.parametrize("name", ["store.db", "store.db-wal", "other.db", "other.db-shm"])
def test_results_are_not_written_to_a_database(
    batch: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """The store of the batch, also before it exists, another database and the journals of both are rejected."""
    other = tmp_path / "other.db"
    other.write_bytes(b"SQLite format 3\0 and more")
    with pytest.raises(InvalidSetting, match="is a database"):
        anyio.run(lambda: run_batch([BatchLine("a", ("Hi",))], **{**batch, "out": tmp_path / name}))
    assert [each.name for each in tmp_path.iterdir()] == ["other.db"]


@pytest.mark.parametrize(
    ("limit", "value"),
    [("concurrency", 0), ("attempts", "x"), ("requests_per_minute", -1), ("tokens_per_minute", -1)],
)
async def test_invalid_limits_are_rejected(batch: dict[str, Any], limit: str, value: Any) -> None:
    """A limit of another type, or below its minimum, is rejected: -1 is not one request or token per minute."""
    with pytest.raises(
        InvalidSetting, match=f"{limit} must be (int, not str|an integer of at least)"
    ):
        await run_batch([BatchLine("a", ("Hi",))], **{**batch, limit: value})


async def test_file_of_another_program_is_unchanged(batch: dict[str, Any]) -> None:
    """Only a partial result is removed from the end of a file, not another line without a line break."""
    for text in ("my diary", "my diary\n", '{"id": "a", "prompt": "Hi"}', '{"id": 1, "a'):
        batch["out"].write_text(text)
        with pytest.raises(InvalidBatch, match="is not a result of a batch"):
            await run_batch([BatchLine("a", ("Hi",))], **batch)
        assert batch["out"].read_text() == text


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """A byte order mark, which some editors write, is ignored."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "prompt": "Hi"}\n\n', encoding="utf-8-sig")
    assert read_lines(file) == [BatchLine("a", ("Hi",))]


def test_results_are_private(tmp_path: Path) -> None:
    """Only the owner can read the answers; an existing file keeps its permissions."""
    file = tmp_path / "out.jsonl"
    old = os.umask(0)
    try:
        with ResultsFile(file) as results:
            results.append(LineResult("a", "completed"))
    finally:
        os.umask(old)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with ResultsFile(file) as results:
        results.append(LineResult("b", "completed"))
    assert file.stat().st_mode & 0o777 == 0o640


def test_full_disk_is_reported_with_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk is reported, and the file is usable when there is space again."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, ResultsFile(tmp_path / "out.jsonl") as results:
        patch.setattr("os.fsync", full)
        with pytest.raises(InvalidBatch, match="free some space"):
            results.append(LineResult("a", "completed"))
    with ResultsFile(tmp_path / "out.jsonl") as results:
        results.append(LineResult("b", "completed"))
        assert "b" in results.load()


def test_partial_last_line_is_removed(tmp_path: Path) -> None:
    """Complete lines before a truncated one are retained, also one without its line break, and new ones complete."""
    for length in range(0, 130, 13):
        file = tmp_path / f"{length}.jsonl"
        with ResultsFile(file) as results:
            for name in ("a", "b"):
                results.append(LineResult(name, "completed", ("x" * 20,), cost=0.5))
        file.write_bytes(file.read_bytes()[:length])
        complete = file.read_bytes().count(b"\n")
        with ResultsFile(file) as results:
            assert len(results.load()) == complete
            results.append(LineResult("c", "failed", error="no", error_class="ServerFailed"))
            assert list(results.load()) == [*("a", "b")[:complete], "c"]
    file = tmp_path / "out.jsonl"
    with ResultsFile(file) as results:
        results.append(LineResult("a", "completed", ("é",)))
    file.write_bytes(file.read_bytes().removesuffix(b"\n"))
    with ResultsFile(file) as results:
        results.append(LineResult("b", "completed"))
        assert list(results.load()) == ["a", "b"]


async def test_exception_of_any_kind_ends_the_batch(
    batch: dict[str, Any], server: TestServer
) -> None:
    """An exception of a tool that is not an ``Exception`` is raised, and the batch does not run the other lines."""

    class Stop(BaseException):
        pass

    is_other_running = threading.Event()

    def stop() -> str:
        assert is_other_running.wait(60)
        raise Stop

    async def wait() -> None:
        is_other_running.set()
        await anyio.sleep_forever()

    prompts = ["Call stop with {}", "Call wait with {}", *["Hello"] * 5]
    lines = [BatchLine(str(number), (prompt,)) for number, prompt in enumerate(prompts)]
    with pytest.raises(Stop):
        await run_batch(lines, **batch, runner=AsyncioRunner(tools=[stop, wait]), concurrency=2)
    assert len(server.requests) == 2


CHILD_SCRIPT = """
import sys
from kedge import run_sync
from kedge.batch import run_batch
prompts, out, store, model = sys.argv[1:]
def on_progress(progress):
    print(progress.done, flush=True)
run_sync(run_batch(prompts, out, store_url=store, model=model, concurrency=3, lease=0.5, on_progress=on_progress))
"""


async def test_killed_batch_continues_in_another_process(
    batch: dict[str, Any], server: TestServer, tmp_path: Path
) -> None:
    """After SIGKILL only pending requests are repeated: at most one turn of each concurrent line."""
    server.faults.set("slow_first_byte=0.05")
    lines = [{"id": str(i), "prompts": [f"One {i}", f"Two {i}"]} for i in range(20)]
    file = write_prompts(tmp_path, *lines)
    arguments = [str(file), str(batch["out"]), batch["store_url"], batch["model"]]
    command = ["-c", CHILD_SCRIPT, *arguments]
    with ForkedProcess(command, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout or ())
        assert await anyio.to_thread.run_sync(lambda: "4\n" in lines)
        process.kill()
    server.faults.clear()
    async with open_store(batch["store_url"]) as store:
        saved = len([row for row in await store.responses() if row.status == "completed"])
    summary = await run_batch(file, **batch, lease=0.5)
    assert summary.skipped >= 4
    assert summary.skipped + summary.completed == 20
    assert len(server.requests) - 40 <= 3
    async with open_store(batch["store_url"]) as store:
        assert len(await store.responses()) == 40
    assert saved >= 8


async def test_line_with_schema_has_valid_json_answers(
    batch: dict[str, Any], tmp_path: Path, server: TestServer
) -> None:
    """Invalid answers are requested again, and the schema is part of the line's fingerprint."""
    number = {"type": "integer"}
    prompts = ["What is 2 + 3?", "First invalid: What is 3 + 4?"]
    second = {"id": "b", "prompt": "Always invalid: Hello", "schema": number}
    file = write_prompts(tmp_path, {"id": "a", "prompts": prompts, "schema": number}, second)
    await run_batch(file, **batch)
    results = read_results(batch)
    assert results["a"]["answers"] == ["5", "7"]
    assert (results["b"]["status"], results["b"]["error_class"]) == ("failed", "OutputInvalid")
    sent = len(server.requests)
    line = BatchLine("a", ("x",), schema=number)
    assert BatchLine.from_dict(line.to_dict()) == line
    work = BatchJob("n", "", "m")
    assert work.fingerprint(line) != work.fingerprint(replace(line, schema=None))
    file = write_prompts(
        tmp_path, {"id": "a", "prompt": "What is 2 + 3?", "schema": {"type": "boat"}}
    )
    with pytest.raises(
        InvalidBatch, match=r"line 1 of prompts\.jsonl: schema: .* not a valid JSON schema"
    ):
        await run_batch(file, **batch)
    with pytest.raises(InvalidBatch, match="schema must be an object"):
        BatchLine.from_dict({"id": "a", "prompt": "x", "schema": []})
    assert len(server.requests) == sent
