"""Tests of ``kedge chat`` with pipes, signals and separate processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cli.sample_store import execute, run_command, run_json
from for_each import for_each
from forked import ForkedProcess
from kedge.cli.chat import command
from kedge.cli.chat_session import ChatOptions
from kedge.cli.chat_tools import create_default_tools
from kedge.errors import ToolFailed
from kedge.testing import TestServer

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
KEDGE = [sys.executable, "-m", "kedge"]
TIMEOUT = 300
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def invoke_chat(lines: str, *options: str, code: int = 0) -> Result:
    """Pipe lines into a chat in this process, which is faster."""
    result = CliRunner().invoke(command, options, input=lines)
    assert result.exit_code == code, result.output
    return result


def test_message_argument_is_answered_and_nothing_is_read() -> None:
    """A message is sent alone and the input is not read; with a name it is the next message of a conversation."""
    result = invoke_chat("What is 7+7?\n", "What is 2+3?")
    assert "2+3 = 5." in result.stdout
    assert "7+7" not in result.stdout
    assert not result.stdout.startswith(">")
    assert 'You said: "/etc/hosts"' in invoke_chat("", "/etc/hosts").stdout  # not a command
    several = invoke_chat("What is 2+3?\nExplain it.\n", "-", "--json")  # one message
    assert len(several.stdout.splitlines()) == 1
    invoke_chat("", "-c", "notes", "What is 2+3?")
    result = invoke_chat("", "-c", "notes", "--json", "What did I say first?")
    reply = json.loads(result.stdout)
    assert 'You said first: "What is 2+3?"' in reply["text"]


def test_json_has_the_reasoning_text(kedge_server: TestServer) -> None:
    """A turn has the reasoning that the provider shows, also in ``kedge show``, and otherwise an empty text."""
    model = f"chat:{kedge_server.base_url}#practice"
    reply = run_json("chat", "Think about two.", "--model", model, "-c", "thoughts")
    blocks = run_json("show", "thoughts")["blocks"]
    (stored,) = [each for each in blocks if each["kind"] == "reasoning"]
    assert reply["reasoning"] == "\n\n".join(stored["texts"]) != ""
    assert run_json("chat", "What is 2+3?", "--model", model)["reasoning"] == ""


def list_notes(output: str) -> list[str]:
    """Return the lines in brackets of a chat."""
    return [line for line in output.splitlines() if line.startswith("[")]


def test_an_answer_has_one_line_and_details_on_request(
    folder: Path, kedge_server: TestServer
) -> None:
    """Tools, reasoning and healing are one line after the answer; ``/why`` and ``--details`` show each of them."""
    (folder / "sums_for_chat.py").write_text(
        "def add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n"
    )
    options = ("-c", "sums", "--tool", "sums_for_chat:add")
    invoke_chat("My name is Ada.\n", *options)
    kedge_server.forget()
    asked = "Think, then please call add with a=2 and b=3\n"
    done = invoke_chat(f"{asked}/why\n", *options).stdout
    answer, _, why = done.partition("> /why\n")
    (line,) = list_notes(answer)
    assert line.startswith("[chained on resp_")
    assert "3 requests, 1 tool call" in line
    for part in (
        '[add {"a":2,"b":3} -> 5]',
        "[the server no longer had the earlier response; the full conversation was resent]",
        "[sent in full: lost]",
        "Refused by the server: a request of 1 block",
        "  It was sent again in another request.",
        "Chained on resp_",
    ):
        assert part in why
    shown = list_notes(invoke_chat(asked, *options, "--details").stdout)
    assert [each for each in shown if each.startswith("[add")] == ['[add {"a":2,"b":3} -> 5]']
    assert len(shown) == 2


def read_last_question(name: str) -> list[dict[str, Any]]:
    """Return the content of the newest message of a user in a stored conversation."""
    blocks = run_json("show", name)["blocks"]
    return [each for each in blocks if each["kind"] == "user"][-1]["parts"]


def test_files_are_attached_to_the_next_message(tmp_path: Path) -> None:
    """Images, text under its name and standard input are parts of a message; an edited one retains them."""
    (tmp_path / "dot.png").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("Zürich\n", encoding="utf-8")
    files = [f"--attach={tmp_path / name}" for name in ("dot.png", "notes.txt")]
    invoke_chat("", "What is this?", "-c", "pictures", *files)
    question, picture, notes = read_last_question("pictures")
    assert (question["text"], notes["text"]) == ("What is this?", "notes.txt:\n\nZürich\n")
    assert picture["type"] == "image"
    invoke_chat("+ added\n", "Summarize the change", "-a", "-", "-c", "diff")
    texts = [part["text"] for part in read_last_question("diff")]
    assert texts == ["Summarize the change", "standard input:\n\n+ added\n"]
    lines = [
        f"/attach {tmp_path / 'dot.png'}",
        "look",
        "no picture",
        "/undo",
        "/edit look again",
        "/attach",
    ]
    result = invoke_chat("\n".join(lines), "-c", "attached")
    assert "1 file attached to your next message" in result.stdout
    assert "usage: /attach FILE" in result.stdout
    question, picture = read_last_question("attached")
    assert (question["text"], picture["type"]) == ("look again", "image")


@for_each(
    ("options", "code", "problem"),
    [
        (["hello", "-a", "missing.png"], 2, "there is no file missing.png"),
        (["-a", "-"], 2, "needs a MESSAGE"),
        (["-", "-a", "-"], 2, "needs a MESSAGE"),
        (["hello", "-a", "-", "-a", "-"], 2, "can be given once"),
        *(([message], 2, "the message is empty") for message in ("", " ", "-")),
        *((["-c", name], 2, "the name is empty") for name in ("", "  ")),
        (["Hello", "--model", ""], 2, "--model: it is empty"),
        (["-c", "caf\udce9"], 1, "is not UTF-8"),
    ],
)
def test_unusable_options_are_reported(options: list[str], code: int, problem: str) -> None:
    """A missing file, an empty text, as of an unset variable, or invalid bytes are reported before anything is sent."""
    done = invoke_chat("", *options, code=code)
    assert problem in done.output
    assert code == 2 or "iconv" in done.stderr
    assert "internal error" not in done.stderr


def test_piped_chat_is_chained() -> None:
    """Each answer has a line about what was sent, or a JSON object; the model can call built-in tools."""
    done = invoke_chat("What is 2+3?\nWhat did I say first?\n")
    assert "2+3 = 5." in done.stdout
    assert 'You said first: "What is 2+3?"' in done.stdout
    statuses = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert statuses[0].startswith("[new chain, sent 1 of 1 block, ")
    assert statuses[1].startswith("[chained on resp_")
    assert "sent 1 of 3 blocks" in statuses[1]
    printed = invoke_chat("What is 2+3?\nWhat did I say first?\n", "--json")
    first, second = (json.loads(line) for line in printed.stdout.splitlines())
    assert first["text"] == "2+3 = 5."
    assert first["requests"][0]["anchor"] == ""
    assert second["requests"][0]["anchor"] == first["response_id"]
    assert second["requests"][0]["sent_blocks"] == 1
    called = invoke_chat("Please call days_between with first=2026-01-01 and second=2026-03-01\n")
    assert "days_between" in called.stdout
    assert "59" in called.stdout


def test_invalid_utf_8_is_reported_and_chat_continues() -> None:
    """A line that is not UTF-8 is reported instead of being guessed."""
    lines = b"caf\xe9\nWhat is 2+3?\n"
    environ = {**os.environ, "PYTHONUTF8": "1"}
    command = [*KEDGE, "chat"]
    done = subprocess.run(command, input=lines, capture_output=True, check=False, env=environ)
    assert done.returncode == 1
    assert b"Is the text UTF-8?" in done.stderr
    assert b"2+3 = 5." in done.stdout


def test_conversation_may_have_the_prefix_of_ids_as_its_name() -> None:
    """A conversation named ``conv`` is a new one, although all ids begin with it."""
    invoke_chat("My name is Ada.\n", "-c", "quay")
    for name in ("conv", "conv_", "conv_…"):
        done = invoke_chat("What is my name?\n", "-c", name)
        assert "You have not told me your name." in done.stdout


def test_built_in_tools_reject_invalid_arguments() -> None:
    """The model learns what a built-in tool expects instead of a value that it cannot use."""
    clock, days_between = create_default_tools()
    with pytest.raises(ToolFailed, match="'Mars'; use a name such as Europe/Paris"):
        clock("Mars")
    with pytest.raises(ToolFailed, match="5; use a name"):
        clock(5)
    with pytest.raises(ToolFailed, match="'soon' is not a date; use a form such as 2026-01-31"):
        days_between("soon", "2026-01-31")
    with pytest.raises(ToolFailed, match="20260131 is not a date"):
        days_between("2026-01-31", 20260131)


def test_custom_tools_can_be_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--tool`` accepts a function of a module in the current folder."""
    (tmp_path / "mytools.py").write_text(
        'def shout(text: str) -> str:\n    """Shout."""\n    return text.upper()\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # restored, because the command extends it
    done = invoke_chat("Please call shout with text=hello\n", "--tool", "mytools:shout")
    assert "HELLO" in done.stdout


def test_chat_commands() -> None:
    """/plan, /show, /help and /quit work, and an unknown command is reported."""
    done = invoke_chat("Hello\n/plan\n/show\n/help\n/nonsense\n/quit\nnot reached\n")
    assert "Chained on resp_" in done.stdout
    assert "0 user        Hello" in done.stdout
    assert "/plan [TEXT]    show what the next request" in done.stdout
    assert "unknown command /nonsense" in done.stdout
    assert "not reached" not in done.stdout


def test_tracing_without_an_exporter_is_reported() -> None:
    """A note is printed, because spans without an exporter are not visible anywhere."""
    assert "Note: --trace has no effect" in invoke_chat("Hello\n", "--trace").stderr
    assert invoke_chat("Hello\n").stderr == ""


def test_message_can_be_written_in_an_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the editor without saving sends nothing."""
    texts = iter(["What is\n2+3?\n", None])
    monkeypatch.setattr(click, "edit", lambda text: next(texts))
    edited = invoke_chat("/editor\n/editor What\n")
    assert "2+3 = 5." in edited.stdout
    assert "nothing was sent" in edited.stdout


def test_conversation_is_usable_after_error(tmp_path: Path) -> None:
    """An unreachable server is reported, its password is neither printed nor stored, and the chat continues."""
    model = "responses:http://ada:secret-words@127.0.0.1:9/v1#x"
    done = invoke_chat("hi\n/show\n", "--model", model, code=1)
    assert "could not reach the server at http://127.0.0.1:9/v1" in done.stderr
    assert done.stderr.startswith("Error: ")
    assert "secret-words" not in done.output
    assert "Hint: Is the server running?" in done.stderr
    assert "0 blocks" in done.stdout
    address = "responses:http://ada:planted@127.0.0.1:9/v1#x"
    done = invoke_chat("/model\nhi\n", "--model", address, "-c", "harbour", code=1)
    assert "ada:…@127.0.0.1" in done.stdout
    assert "planted" not in done.output
    assert all(b"planted" not in file.read_bytes() for file in tmp_path.rglob("*.db*"))


def test_unanswered_message_can_be_resumed(kedge_server: TestServer) -> None:
    """A failed message is reported by the exit code and stored, and /resume gets its answer."""
    model = f"responses:{kedge_server.base_url}#practice"
    kedge_server.faults.set("status=400", times=1)
    options = ("-c", "harbour", "--model", model, "--json")
    failed = invoke_chat("What is 2+3?\n", *options, code=1)
    assert json.loads(failed.stdout)["kind"] == "RequestRefused"
    done = invoke_chat("/resume\n/resume\n", "-c", "harbour")
    assert "2+3 = 5." in done.stdout
    assert "no unanswered message" in done.stdout
    kedge_server.faults.set("status=400", times=1)
    invoke_chat("", "--model", model, "Hello", code=1)


def test_conversation_is_usable_after_ctrl_c() -> None:
    """The interrupted message is undone, and the next one is answered."""
    conversation = ForkedProcess(
        ["-m", "kedge", "chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert conversation.stdin is not None
    assert conversation.stdout is not None
    conversation.stdin.write("My name is Ada.\nSlowly write 400 words.\n")
    conversation.stdin.flush()
    for line in conversation.stdout:
        if line.startswith("> Slowly"):
            break
    assert conversation.stdout.read(3)
    conversation.send_signal(signal.SIGINT)
    rest, _ = conversation.communicate("What did I say last?\n", timeout=TIMEOUT)
    assert "interrupted" in rest
    assert 'You said last: "My name is Ada."' in rest
    assert conversation.returncode == 0


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], "(interrupted)"),
        (["-c", "harbor"], "(interrupted; the partial answer is stored"),
        (["--json"], '{"error": "interrupted"'),
    ],
)
def test_ctrl_c_ends_a_chat_with_a_message(options: list[str], shown: str) -> None:
    """A chat of one message ends with the exit code of Ctrl-C, so that a script notices."""
    command = ["-m", "kedge", "-vvv", "chat", "Very slowly write 400 words.", *options]
    with ForkedProcess(command, **PIPES) as chat:
        assert chat.stderr is not None
        assert any("request sent" in line for line in chat.stderr)
        chat.send_signal(signal.SIGINT)
        output, _ = chat.communicate(timeout=TIMEOUT)
    assert shown in output
    assert chat.returncode == 130


def test_ctrl_c_does_not_wait_for_a_tool(tmp_path: Path) -> None:
    """A function that blocks its thread does not delay the end of the process."""
    wait = "    print('waiting', file=sys.stderr, flush=True)\n    threading.Event().wait()\n"
    (tmp_path / "tools.py").write_text(f"import sys, threading\n\ndef wait() -> str:\n{wait}")
    command = ["-m", "kedge", "chat", "Please call wait", "--tool", "tools:wait"]
    with ForkedProcess(command, **PIPES, cwd=tmp_path) as chat:
        assert chat.stderr is not None
        assert chat.stderr.readline() == "waiting\n"
        chat.send_signal(signal.SIGINT)
        output, errors = chat.communicate(timeout=TIMEOUT)
    assert "(interrupted)" in output
    assert errors == ""
    assert chat.returncode == 130


def test_ctrl_c_ends_a_chat_that_waits_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while no message is answered ends a chat in a pipe with its exit code."""

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run_command("chat").exit_code == 130


def test_an_open_chat_is_not_continued_while_it_is_being_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A message after the deletion was scheduled elsewhere is rejected, and the chat continues after the undo."""
    path = tmp_path / "kedge" / "kedge.db"

    schedule = "UPDATE conversations SET delete_at = 1e12"
    lines = ["My name is Ada.", "What is my name?", "/undo", "/fork", "Who am I?"]
    changes = {"What is my name?": schedule, "Who am I?": schedule.replace("1e12", "NULL")}

    def read(_: str) -> str:
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if line in changes:
            execute(path, changes[line])
        return line

    monkeypatch.setattr("builtins.input", read)
    done = run_command("chat", "-c", "harbour")
    assert done.output.count("is about to be deleted; undo that to continue it") == 3
    questions = [
        block for block in run_json("show", "harbour")["blocks"] if block["kind"] == "user"
    ]
    texts = [block["parts"][0]["text"] for block in questions]
    assert texts == ["My name is Ada.", "Who am I?"]


def test_practice_model_without_stored_responses_gets_full_conversation(tmp_path: Path) -> None:
    """``kedge inspect`` predicts the loss, and tables that cannot be used are reported."""
    invoke_chat("My name is Ada.\n", "-c", "harbour")
    assert [path.name for path in (tmp_path / "kedge").iterdir()] == ["kedge.db"]
    path = tmp_path / "kedge" / "kedge.db"
    execute(path, "DELETE FROM practice_nodes")
    plan = run_json("inspect", "harbour", "--say", "What is my name?")["plan"]
    assert plan["anchor"] == ""
    assert plan["rejected"][0]["reason"] == "lost"
    execute(path, "DROP TABLE practice_facts")
    second = invoke_chat("What is my name?\n", "-c", "harbour")
    assert "Your name is Ada." in second.stdout
    (line,) = list_notes(second.stdout)
    assert line.startswith(
        "[sent in full: the server no longer had the earlier response, sent 4 of"
    )
    assert line.endswith("2 requests]")
    assert "Note: the practice model remembers this conversation only" in second.stderr
    assert invoke_chat("Hello\n", "-c", "harbour", "--json").stderr == ""


def test_deleted_conversation_is_erased_from_practice_database(tmp_path: Path) -> None:
    """The deleted text is in no file, and other conversations stay chained."""
    invoke_chat("A secret.\n", "-c", "harbour")
    invoke_chat("My name is Ada.\n", "-c", "quay")
    assert run_json("delete", "harbour", "--yes")["deleted"]
    content = b"".join(path.read_bytes() for path in (tmp_path / "kedge").iterdir())
    assert b"A secret." not in content
    plan = run_json("inspect", "quay", "--say", "What is my name?")["plan"]
    assert plan["sent_blocks"] == 1


def test_undo_edit_and_fork_create_branches() -> None:
    """/undo, /edit and /fork create branches, and /tree still shows all messages."""
    lines = ["My name is Ada.", "What is 2+3?", "/undo", "What is my name?", "/edit What is 3+4?"]
    done = invoke_chat("\n".join([*lines, "/fork quay", "/tree", "/show", "/edit"]))
    assert "back at node 3, 2 blocks" in done.stdout
    assert "3+4 = 7." in done.stdout
    assert "now in the fork conv_" in done.stdout
    tree = done.stdout[done.stdout.index("> /tree") : done.stdout.index("> /show")]
    for texts in ("What is 2+3?", "What is my name?", "What is 3+4?"):
        assert texts in tree
    assert "├─" in tree
    output = done.stdout[done.stdout.index("> /show") :]
    assert "What is 3+4?" in output
    assert "What is 2+3?" not in output
    assert "usage: /edit TEXT" in output


def test_another_model_can_continue() -> None:
    """Another model gets the full conversation; an unknown one is rejected without changing the model."""
    done = invoke_chat(
        "My name is Ada.\n/model\n/model oracle:x\n/model practice\nWhat is my name?\n"
    )
    assert "current model: practice\n" in done.stdout
    assert "oracle" in done.stderr
    assert "Your name is Ada." in done.stdout


def test_chat_commands_print_json() -> None:
    """With ``--json``, each input line prints one object."""
    done = invoke_chat("Hello\n/plan And?\n/tree\n/undo\n/undo\n", "--json")
    turn, plan, tree, undone, failed = (json.loads(line) for line in done.stdout.splitlines())
    assert turn["conversation"].startswith("conv_")
    assert plan["command"] == "/plan"
    assert "sending 1 block" in plan["output"]
    assert "(head)" in tree["output"]
    assert "\x1b" not in tree["output"]  # no colors
    assert undone["output"].startswith("back at node 1")
    assert failed["kind"] == "NotInStore"


def test_piped_chat_is_stored_by_save(tmp_path: Path) -> None:
    """/save stores the chat under a name that is not in use, and /redo moves the head forward."""
    invoke_chat("Hello\n", "-c", "harbour")
    lines = ["My name is Ada.", "/save", "/save harbour", "/save quay", "/undo", "/redo", "/redo"]
    done = invoke_chat("\n".join(lines))
    assert "usage: /save NAME; Model: practice, 2 blocks so far. Not saved" in done.stdout
    assert "there is already a conversation 'harbour'" in done.stdout
    assert "saved as quay; continue with: kedge chat -c quay" in done.stdout
    assert "forward at node" in done.stdout
    assert "there is nothing to redo" in done.stderr
    second = invoke_chat("What is my name?\n/save pier\n", "-c", "quay")
    assert "Your name is Ada." in second.stdout
    assert "saved as pier" in second.stdout
    assert "Your name is Ada." in invoke_chat("What is my name?\n", "-c", "pier").stdout


def test_conversation_without_messages_is_not_stored(tmp_path: Path) -> None:
    """A new conversation without messages, or with a model that cannot be connected, is not stored."""
    invoke_chat("/help\n", "-c", "harbour")
    invoke_chat("Hello\n", "-c", "harbour", "--model", "nobody:x", code=1)
    assert run_command("inspect", "harbour").exit_code == 1


def test_chat_without_a_folder_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note is printed, and the chat works."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(ChatOptions, "is_saved", True)
    done = invoke_chat("Hello\n")
    assert "Note: this chat is not saved: " in done.stderr
    assert "You said" in done.stdout


PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
STOP_SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]}


def write_schema(folder: Path, schema: object = STOP_SCHEMA) -> str:
    """Write a schema file and return its path."""
    file = folder / "stop.json"
    file.write_text(json.dumps(schema))
    return str(file)


def test_with_a_schema_only_valid_json_is_printed(tmp_path: Path) -> None:
    """Invalid answers are requested again; only valid JSON is printed, with ``--json`` as its value."""
    result = invoke_chat(
        "I travel to Lisbon for 3 days.\n/model\nFirst invalid: I travel to Oslo for 2 days.\n",
        "--schema",
        write_schema(tmp_path),
    )
    assert "current model: practice" in result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"city": "Lisbon", "days": 3},
        {"city": "Oslo", "days": 2},
    ]
    assert "1 answer rejected]" in result.stderr
    assert "2 requests" in result.stderr
    schema = write_schema(tmp_path, {"type": "integer"})
    result = invoke_chat("What is 2 + 3?\n", "--schema", schema, "--json")
    turn = json.loads(result.stdout)
    assert (turn["output"], turn["text"]) == (5, '{"value":5}')
    schema = write_schema(tmp_path)
    result = invoke_chat("Always invalid: Hello\n", "--schema", schema, code=1)
    assert result.stdout == ""
    assert "does not match the requested type after 3 attempt(s)" in result.stderr
    assert "the answer is not valid JSON" in result.stderr


def test_invalid_schema_file_is_rejected(tmp_path: Path) -> None:
    """A file that is not a JSON schema is a usage error that says what is wrong with which file."""
    for schema in (["no"], {"type": "boat"}):
        result = invoke_chat("Hello\n", "--schema", write_schema(tmp_path, schema), code=2)
        assert "--schema" in result.stderr
        assert "stop" in result.stderr
    (tmp_path / "notes.txt").write_text("no JSON")
    result = invoke_chat("Hello\n", "--schema", str(tmp_path / "notes.txt"), code=2)
    assert "notes.txt is not a JSON schema: Expecting value" in result.stderr
