"""Tests of ``kedge run``: workflows from files and options, with text and JSON output."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.sample_store import run_command, run_json
from kedge.cli.store_options import run_with_store
from kedge.config import store_url
from kedge.store import Store
from kedge.testing import TestServer
from kedge.turns.frozen_json import thaw

JUDGE = """
def five(answer):
    return "" if "5" in answer else "Say five."

def first(said):
    return said[0].side
"""
STEPS = """
[inputs]
number = 5
[[steps]]
name = "double"
prompt = "What is {number} * 2?"
schema = "double.json"
[[steps]]
name = "more"
prompt = "What is {double.result} + 1?"
"""


@pytest.fixture(autouse=True)
def judge(folder: Path) -> None:
    """Write the module of the judge."""
    (folder / "judging.py").write_text(JUDGE)


def test_refine_by_options_and_resume_by_id(folder: Path, kedge_server: TestServer) -> None:
    """Resuming a finished workflow returns the same result without sending a request."""
    done = run_command(
        "run", "refine", "--task", "What is 2+3?", "--judge", "judging:five", "--id", "wf_one"
    )
    assert done.exit_code == 0, done.stderr
    assert "round 1  2+3 = 5.\nverdict  passed" in done.stdout
    assert "[passed after 1 round, wf_one]" in done.stdout
    repeated = run_json("run", "refine", "--resume", "wf_one")
    other = run_command("run", "steps", "--resume", "wf_one")
    assert "wf_one is a refine workflow; continue with: kedge run refine" in other.stderr
    assert repeated["passed"] is True
    assert repeated["rounds"][0]["stored"] is True
    assert len(kedge_server.requests) == 1


def test_debate_by_options(folder: Path) -> None:
    """Sides can have their own models, and a function is the judge."""
    model = "--side=b=practice"
    report = run_json(
        "run", "debate", "--question", "Tea?", "--side=a", model, "--judge", "judging:first"
    )
    assert report["ruling"] == {"over": True, "winner": "a", "reason": ""}
    assert [each["side"] for each in report["arguments"]] == ["a", "b"]
    done = run_command(
        "run", "debate", "--question", "Tea?", "--side=a", "--side=b", "--judge", "judging:first"
    )
    assert "[a won after 1 round" in done.stdout


def test_steps_from_a_file(folder: Path) -> None:
    """A schema is read beside the file, ``--input`` overrides inputs, and dates of TOML become text."""
    (folder / "double.json").write_text(
        '{"type": "object", "required": ["result"], "properties": {"result": {"type": "number"}}}'
    )
    (folder / "steps.toml").write_text(STEPS)
    assert run_json("run", "steps", "steps.toml")["results"] == {
        "double": {"result": 10},
        "more": "10 + 1 = 11.",
    }
    report = run_json("run", "steps", "steps.toml", "--input", "number=7")
    assert report["results"]["more"] == "14 + 1 = 15."
    assert run_json("run", "steps", "--resume", report["workflow"])["results"] == report["results"]
    assert "more  10 + 1 = 11." in run_command("run", "steps", "steps.toml").stdout
    (folder / "dates.toml").write_text(
        '[inputs]\nday = 2026-01-02\nat = [08:30:00]\n[[steps]]\nname = "a"\nprompt = "Say {day} {at.0}"\n'
    )
    assert run_json("run", "steps", "dates.toml")["results"] == {"a": "2026-01-02 08:30:00"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_failed_run_is_resumed(folder: Path, kedge_server: TestServer, options: list[str]) -> None:
    """The error names the command that continues, which sends only the remaining requests."""
    (folder / "steps.toml").write_text(
        '[[steps]]\nname = "a"\nprompt = "Hi"\n[[steps]]\nname = "b"\nprompt = "{a} Call it."\n'
    )
    kedge_server.faults.set("status=400", times=1)
    done = run_command("run", "steps", "steps.toml", "--id", "wf_two", *options)
    assert done.exit_code == 1
    assert "Continue with: kedge run steps --resume wf_two" in done.stderr
    assert run_json("run", "steps", "--resume", "wf_two")["workflow"] == "wf_two"
    assert len(kedge_server.requests) == 3


def test_failure_of_a_judge_is_reported(folder: Path, kedge_server: TestServer) -> None:
    """The error names the function; after its correction the workflow continues with the stored answer."""
    arguments = ["--task", "What is 2+3?", "--judge", "mine:judge", "--id", "wf_three"]
    (folder / "mine.py").write_text("async def judge(answer):\n    return answer / 2\n")
    done = run_command("run", "refine", *arguments)
    assert done.exit_code == 1
    assert "the judge 'mine:judge' failed: TypeError: unsupported operand" in done.stderr
    assert "Continue with: kedge run refine --resume wf_three" in done.stderr
    (folder / "mine.py").write_text("def judge(answer):\n    return True  # corrected\n")
    assert run_json("run", "refine", "--resume", "wf_three")["passed"] is True
    assert len(kedge_server.requests) == 1


SIDES = 'sides = [{name = "a", model = 3}, {name = "b"}]'
INVALID = [
    (["refine"], "refine: 'task' is missing"),
    (["refine", "--task", "x", "--judge", "judging:six"], "no function named 'six'"),
    (["refine", "--task", "x", "--judge", "nothing:x"], "cannot import 'nothing'"),
    (
        ["refine", "--task", "x", "--judge", "broken:x"],
        "cannot import 'broken' for 'broken:x': SyntaxE",
    ),
    (["refine", "--task", "x", "--judge", "a:b", "--rubric", "c"], "needs one of"),
    (["refine", "none.toml"], "cannot be read"),
    (["refine", "--resume", "wf_none"], "there is no workflow 'wf_none'"),
    (["refine", "--resume", "wf_none", "--task", "x"], "give no file and no other options"),
    (["debate", "--question", "x", "--side=a", "--rubric", "y"], "two or more sides"),
]
INVALID_FILES = [
    ("steps", '[[steps]]\nname = "a"\n', "steps[0] needs 'prompt'"),
    ("steps", '[[step]]\nname = "a"\n', "has the unknown member 'step'"),
    ("steps", f"steps = {'[' * 20_000}", "is not valid TOML"),
    ("steps", 'steps = [{name = "a", prompt = "b", attempts = "3"}]', "steps[0].attempts must be a whole number"),
    ("debate", f'question = "x"\n{SIDES}\n[judge]\nrubric = "y"', "sides[0].model must be a text"),
    ("refine", 'task = "x"\n[judge]\nfunction = 5', "judge.function must be a text"),
]  # fmt: skip


def test_invalid_workflow_is_reported_in_one_line(folder: Path, kedge_server: TestServer) -> None:
    """An invalid workflow is an error of one line and a hint, and nothing is sent."""
    (folder / "broken.py").write_text("def x(:")
    files = [
        ([kind, f"{number}.toml"], said) for number, (kind, _, said) in enumerate(INVALID_FILES)
    ]
    for number, (_, text, _) in enumerate(INVALID_FILES):
        (folder / f"{number}.toml").write_text(text)
    for arguments, message in (*INVALID, *files):
        done = run_command("run", *arguments)
        assert (done.exit_code, message in done.stderr) == (1, True), (arguments, done.stderr)
        assert len(done.stderr.splitlines()) <= 2
    assert not kedge_server.requests


def test_malformed_input_option_is_an_error(folder: Path, kedge_server: TestServer) -> None:
    """An input without a name or a value is a usage error, and nothing is sent."""
    (folder / "steps.toml").write_text(STEPS)
    for argument in ("topic", "=topic"):
        done = run_command("run", "steps", "steps.toml", "--input", argument)
        assert done.exit_code == 2
        assert "is not NAME=TEXT" in done.stderr
    assert not kedge_server.requests


TAMPERED: list[tuple[dict[str, Any], str]] = [
    ({"judge": {"function": "os:remove"}}, "function os:remove"),
    ({"judge": {"schema": "/etc/hosts"}}, "file /etc/hosts"),
    ({"model": "responses:http://127.0.0.1:9/v1#m"}, "model at responses:http://127.0.0.1:9/v1"),
]


def test_tampered_workflow_is_not_resumed(folder: Path, kedge_server: TestServer) -> None:
    """A function, file or address that was changed in the store is rejected and named."""
    done = run_command(
        "run", "refine", "--task", "What is 2+3?", "--judge", "judging:five", "--id", "wf_own"
    )
    assert done.exit_code == 0, done.stderr
    sent = len(kedge_server.requests)
    originals: list[Any] = []

    async def tamper(store: Store, change: dict[str, Any]) -> None:
        row = await store.conversation("wf_own.author")
        originals.append(row.data)
        data = thaw(originals[0])
        data["workflow"]["spec"]["file"] |= change
        await store.update(row.id, data=data)

    for change, named in TAMPERED:
        run_with_store(partial(tamper, change=change), store_url(str(folder / "store.db")))
        done = run_command("run", "refine", "--resume", "wf_own")
        assert done.exit_code == 1
        assert f"not used on this machine before: {named}" in done.stderr
    assert len(kedge_server.requests) == sent
