"""Type checkers accept the programs of the tutorial, and name misspelled options."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MISSPELLED = {
    "temprature": 'conversation.send("Hello", temprature=0.5)',
    "tols": 'Conversation("practice", tols=[])',
    "tmeout": 'connect("practice", tmeout=3)',
    "max_tokns": "engine.run(turn, max_tokns=5)",
    "streming": 'chat.chat_with_state(None, "Hello", streming=True)',
}
"""Misspelled options, and the call of each."""


def check_types(folder: Path) -> list[dict[str, Any]]:
    """Return the errors of a strict check of the programs in a folder."""
    environment = Path(sys.prefix)
    settings = {
        "typeCheckingMode": "strict",
        "venvPath": str(environment.parent),
        "venv": environment.name,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False)
    return [
        each
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def test_programs_of_the_tutorial_pass_a_strict_check(tmp_path: Path) -> None:
    """Completion and checks work in the first programs of a user."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    programs = re.findall(r"(?ms)^```python[^\n]*\n(.*?)^```", text)
    assert len(programs) > 3
    for number, program in enumerate(programs):
        (tmp_path / f"program_{number}.py").write_text(program)
    errors = check_types(tmp_path)
    assert [(each["file"], each["message"]) for each in errors] == []


def test_misspelled_options_are_named(tmp_path: Path) -> None:
    """Each misspelled option of a call is one error that names it."""
    calls = "\n".join(f"    {call}" for call in MISSPELLED.values())
    (tmp_path / "program.py").write_text(
        "from kedge import Chat, Conversation, Turn, connect\n"
        'conversation, chat = Conversation("practice"), Chat("practice")\n'
        'engine, turn = connect("practice"), Turn()\n'
        f"def run() -> None:\n{calls}\n"
    )
    messages = [
        each["message"] for each in check_types(tmp_path) if each["rule"] == "reportCallIssue"
    ]
    assert [re.findall('"(.*?)"', each) for each in messages] == [[name] for name in MISSPELLED]


@pytest.mark.parametrize("call", MISSPELLED.values())
async def test_misspelled_options_raise(call: str) -> None:
    """At run time they raise an error with a suggestion, before anything is sent."""
    from kedge import Chat, Conversation, KedgeError, Turn, connect, user

    names = {
        "Conversation": Conversation,
        "connect": connect,
        "conversation": Conversation("practice"),
        "chat": Chat("practice"),
        "engine": connect("practice"),
        "turn": Turn([user("Hello")]),
    }
    with pytest.raises(KedgeError, match="did you mean"):
        await eval(call, names)  # noqa: S307 - the calls above
