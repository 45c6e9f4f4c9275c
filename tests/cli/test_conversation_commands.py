"""Tests of the commands that manage conversations, with a sample store and its server."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cli.sample_store import execute, run_command, run_json, serve_sample_store
from kedge._internal.event_loops import run_sync
from kedge.cli import group
from kedge.cli.inspect import inspect_file
from kedge.cli.store_options import (
    complete_names,
    confirmations_file,
    model_references,
    remember,
    require_confirmed,
    run_with_store,
)
from kedge.config import store_url
from kedge.conversation import Chat
from kedge.errors import KedgeError, StoreFull
from kedge.providers import connect
from kedge.store import open_store
from kedge.store.append import insert_node
from kedge.testing.server import TestServer
from kedge.turns import Turn, dumps, file, image, system, tool_call, tool_result, user

pytestmark = pytest.mark.usefixtures("store_path")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, TestServer]]:
    """Yield a store of sample conversations and its server, which the tests of the module share."""
    path = tmp_path_factory.mktemp("sample") / "sample.db"
    with serve_sample_store(path) as server:
        yield path, server


@pytest.fixture
def server(store_path: Path, sample: tuple[Path, TestServer]) -> TestServer:
    """Copy the sample conversations for this test, and return their server."""
    path, server = sample
    remember(model_references(f"responses:{server.base_url}#practice"))
    shutil.copy(path, store_path)
    return server


TWO_HOURS_LATER = (
    "UPDATE conversations SET updated_at = updated_at - 7200",
    "UPDATE nodes SET created_at = created_at - 7200",
)


def test_missing_store_is_not_created(store_path: Path) -> None:
    """The list is empty and says how to start; other commands report that there is no conversation."""
    empty = run_command("conversations")
    assert empty.exit_code == 0
    assert "kedge chat --conversation" in empty.output
    assert run_json("conversations") == []
    assert run_json("search", "harbour") == []
    assert run_json("auth", "list") == []
    missing = run_command("tree", "harbour")
    assert missing.exit_code == 1
    assert "there are no conversations yet" in missing.stderr
    assert not store_path.exists()


def test_conversation_is_renamed_tagged_and_archived(server: TestServer) -> None:
    """Each change is shown in the list and can be undone."""
    assert run_command("rename", "harbour", "Old harbour").output == (
        "Old harbour: renamed, was harbour\n"
    )
    assert "#sea, #ships" in run_command("tag", "Old harbour", "sea").output
    assert run_json("tag", "Old harbour", "sea", "ships", "--remove")["tags"] == []
    assert "no tags" in run_command("tag", "Old harbour", "sea", "--remove").output
    assert "Old harbour: archived" in run_command("archive", "Old harbour").output
    assert [row["title"] for row in run_json("conversations")] == ["quay"]
    assert "No conversations match" in run_command("conversations", "--tag", "none").output
    huge = str(10**30)
    assert run_command("conversations", "--limit", huge, "--offset", huge).exit_code == 2
    assert run_json("archive", "Old harbour", "--restore")["archived"] is False
    assert len(run_json("conversations")) == 2


def test_settings_are_shown_and_changed(server: TestServer) -> None:
    """The mode, the retention and the time to live are printed as they can be entered, and can be reset."""
    unchanged = "harbour: mode default, retention default, ttl default\n"
    assert run_command("settings", "harbour").output == unchanged
    changed = run_command(
        "settings", "harbour", "--mode", "stateless", "--retention", "36h", "--ttl", "14d"
    )
    assert changed.output == "harbour: mode stateless, retention 36h, ttl 2w\n"
    shown = run_json("settings", "harbour")
    assert (shown["mode"], shown["retention"], shown["ttl"]) == ("stateless", 129_600, 1_209_600)
    reset = run_command("settings", "harbour", "--mode", "default", "--retention", "default")
    assert reset.output == "harbour: mode default, retention default, ttl 2w\n"
    assert run_json("settings", "harbour", "--ttl", "default")["ttl"] is None
    assert "'soon' is not a duration" in run_command("settings", "harbour", "--ttl", "soon").stderr
    assert (
        "'private' is not one of" in run_command("settings", "harbour", "--mode", "private").stderr
    )


def test_undo_and_redo_move_the_head(server: TestServer) -> None:
    """Redo continues with the newest message below the head."""
    assert "harbour: back at node 3, 2 blocks" in run_command("undo", "harbour").output
    assert run_json("undo", "harbour")["head"] == 1
    assert "there is nothing to undo" in run_command("undo", "harbour").stderr
    assert "forward at node 3" in run_command("redo", "harbour").output
    assert run_json("redo", "harbour")["head"] == 7
    assert "there is nothing to redo" in run_command("redo", "harbour").stderr


def test_conversation_can_be_followed(
    server: TestServer, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New blocks are printed once, a move of the head is reported, and Ctrl-C ends the command."""
    moves: list[int] = []

    async def move_head(_: float) -> None:
        if not moves:
            raise KeyboardInterrupt
        async with open_store(store_url(str(store_path))) as store:
            row = await store.conversation(harbour["id"])
            await store.move_head(row, await store.node(row, moves.pop(0)), head=row.head)

    monkeypatch.setattr("anyio.sleep", move_head)
    (harbour,) = (row for row in run_json("conversations") if row["title"] == "harbour")
    moves[:] = [3, 5]
    result = run_command("show", "harbour", "--follow")
    assert result.exit_code == 0
    first, last = result.output.split("[now at node 3, 2 blocks]")
    assert "Your name is Ada." in first
    assert "2+3 = 5." in last
    assert "My name is Ada." not in last
    moves[:] = [7]
    last_block = ("--last", "1", "--json")
    lines = run_command("show", "harbour", "--follow", *last_block).output.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["assistant", "user", "assistant"]
    assert run_command("show", "harbour", "--follow", "--at", "3").exit_code == 2


def test_conversations_are_listed(server: TestServer) -> None:
    """Conversations are listed newest first, with answers, tokens and forks, filtered, sorted and paged."""
    quay, harbour = run_json("conversations")
    assert (quay["title"], harbour["title"]) == ("quay", "harbour")
    assert harbour["responses"] == 3
    assert quay["forked_from"] == harbour["id"]
    assert harbour["input_tokens"] > 0
    lines = run_command("conversations").output.splitlines()
    assert lines[0].split() == ["id", "responses", "tokens", "cached", "changed", "title"]
    assert "harbour #ships" in lines[2]

    def titles(*options: str) -> list[str]:
        return [row["title"] for row in run_json("conversations", *options)]

    assert titles("--order", "oldest", "--limit", "1", "--offset", "1") == ["quay"]
    assert titles("--model", "another") == []
    assert titles("--tag", "ships") == titles("--show", "branched") == ["quay", "harbour"]
    assert titles("--since", "1h") == ["quay", "harbour"]
    assert titles("--until", "1h") == []
    assert titles("--since", "2020-01-01", "--until", "2021-01-01") == []
    run_command("archive", "quay")
    assert titles("--show", "archived") == ["quay"]
    assert titles("--archived") == ["quay", "harbour"]


def test_conversation_is_found_by_id_prefix_or_title(server: TestServer) -> None:
    """An unknown or ambiguous name is reported; a fork with the same title is named by its id."""
    other, harbour = (each["id"] for each in run_json("conversations")[:2])
    for name in ("harbour", harbour, harbour[:-2]):
        assert run_json("show", name)["id"] == harbour
    missing = run_command("show", "nowhere")
    assert missing.exit_code == 1
    assert "there is no conversation 'nowhere'" in missing.stderr
    assert "there is no conversation 'conv_'" in run_command("show", "conv_").stderr
    shared = next(harbour[:end] for end in range(20, 0, -1) if other.startswith(harbour[:end]))
    assert "give more of the id" in run_command("show", shared).stderr
    assert run_json("fork", "harbour")["forked_from"] == harbour
    repeated = run_command("import", "-", stdin=run_command("export", harbour).stdout)
    assert repeated.exit_code == 0, repeated.output
    rejected = run_command("show", "harbour")
    assert rejected.exit_code == 1
    assert "2 conversations have the title 'harbour'; use an id: conv_" in rejected.stderr


def test_show_prints_messages(server: TestServer) -> None:
    """Messages are printed up to the head or another node, and ``--last`` limits them."""
    result = run_command("show", "harbour").output
    assert result.index("My name is Ada.") < result.index("What is my name?")
    assert "2+3" not in result
    assert "2+3" in run_command("show", "harbour", "--at", "5").output
    response = run_json("tree", "harbour")["nodes"][4]["response"]["response_id"]
    assert run_json("show", "harbour", "--at", response)["node"] == 5
    assert "'kedge tree' lists them" in run_command("show", "harbour", "--at", "resp_none").stderr
    blocks = run_json("show", "harbour")["blocks"]
    assert run_json("show", "harbour", "--last", "2")["blocks"] == blocks[-2:]
    assert run_json("show", "harbour", "--last", "1", "--at", "3")["blocks"] == blocks[1:2]
    assert "node 7, 4 blocks, the last 1 of" in run_command("show", "harbour", "--last", "1").output
    assert run_command("show", "harbour", "--last", "0").exit_code == 2


def test_show_lists_images_and_files(store_path: Path) -> None:
    """Each image and file of a message or tool result is a line with its type and size, name or URL."""
    photo = image(b"x" * 3_000)
    remote = image("https://example.com/a.png")
    report = file(b"%PDF-", filename="report.pdf", media_type="application/pdf")
    call = tool_call("draw", {}, call_id="c1")
    result = tool_result("c1", [photo])
    blocks = [user(["See:", photo, report, remote]), user([photo]), call, result]
    url = store_url(str(store_path))
    run_with_store(lambda store: store.create("Pictures", blocks=blocks), url, make=True)
    shown = run_command("show", "Pictures", "--full").output
    picture = "[image image/png, 3 kB]"
    others = "[file report.pdf, application/pdf, 5 B]", "[image https://example.com/a.png]"
    assert "\n".join(["You", "See:", picture, *others, "", "You", picture, ""]) in shown
    assert shown.endswith(f"tool result\n{picture}\n")
    assert "base64" not in run_command("show", "Pictures").output


def test_inspect_accepts_a_turn_or_a_chat_state(tmp_path: Path) -> None:
    """A file is inspected with the plan of its next request."""

    async def chat() -> tuple[Turn, bytes]:
        async with connect("practice") as engine:
            answer = await Chat(engine).chat_with_state(None, "My name is Ada.")
            return await engine.run(Turn([system("Be brief."), user("Hello")])), answer.state

    turn, state = run_sync(chat())
    (tmp_path / "turn.json").write_text(dumps(turn))
    (tmp_path / "state").write_bytes(state)
    report = run_json(
        "inspect", str(tmp_path / "turn.json"), "--say", "And?", "--model", "practice"
    )
    assert report["file"].endswith("turn.json")
    assert report["plan"]["anchor"] == turn.blocks[2].response_id
    assert [block["sent"] for block in report["blocks"]] == [True, False, False, True]
    output = run_command("inspect", str(tmp_path / "state"), "--model", "practice").output
    assert "state, chat state of practice, 2 blocks" in output
    assert "Chained on resp_" in output


def test_inspect_reports_invalid_file(tmp_path: Path, server: TestServer) -> None:
    """A file that is neither a Turn nor a chat state, cannot be read or does not exist is reported."""
    wrong = tmp_path / "wrong.json"
    for text in ("[]", "[" * 100_000):
        wrong.write_text(text)
        done = run_command("inspect", str(wrong))
        assert done.exit_code != 0
        assert "has no Turn and no chat state" in done.stderr
    with pytest.raises(KedgeError, match="cannot be read"):
        run_sync(inspect_file(tmp_path / "none.json", "practice"))
    assert "there is no file of this name either" in run_command("inspect", "none.json").stderr
    assert "file" not in run_command("inspect", "nothing").stderr


def test_damaged_confirmations_are_skipped(store_path: Path) -> None:
    """A line that was cut off or is no text does not affect the others."""
    remember(["one", "two"])
    with confirmations_file().open("ab") as file:
        file.write(b'{}\n"th')
    remember(["three"])
    require_confirmed(["one", "two", "three"], "the test", "confirm them")


def test_diff_compares_nodes_and_forks(server: TestServer) -> None:
    """Two positions are named by nodes or by the titles of forks."""
    difference = run_json("diff", "harbour", "5")
    assert difference["shared"] == 2
    assert difference["left"]["blocks"][0]["parts"][0]["text"] == "What is 2+3?"
    assert difference["right"]["node"] == 7
    lines = run_command("diff", "harbour", "5", "7").output.splitlines()
    assert lines[0] == "nodes 5 and 7 share 2 blocks"
    assert [line[0] for line in lines[1:]] == ["-", "-", "+", "+"]
    apart = run_json("diff", "harbour", "head", "quay")
    assert apart["left"]["blocks"] == []
    assert len(apart["right"]["blocks"]) == 2
    assert run_command("diff", "harbour", "nowhere").exit_code == 1


def test_fork_continues_from_any_position(server: TestServer) -> None:
    """A fork has its own title, the same model and all earlier blocks."""
    fork = run_json("fork", "harbour", "--at", "3", "--title", "pier")
    assert fork["node"] == 3
    assert len(run_json("show", "pier")["blocks"]) == 2
    assert run_json("inspect", "pier")["model"].startswith("responses:")
    assert "kedge chat --conversation" in run_command("fork", "harbour").output


def test_search_is_filtered_ranked_and_paged(server: TestServer) -> None:
    """Text is found in every conversation, with the options of `Store.search`, and printed with its context."""
    assert "Ada" in run_command("search", "ada").output
    assert "No matches." in run_command("search", "zeppelin").output
    for empty in ((), ("",), (" ", "")):
        assert run_command("search", *empty).exit_code == 2
    hits = run_json("search", "name")
    assert {hit["kind"] for hit in hits} == {"user", "assistant"}
    user_hits = run_json("search", "name", "--role", "user")
    assert user_hits == [hit for hit in hits if hit["kind"] == "user"]
    assert run_json("search", "name", "--limit", "1", "--offset", "1") == hits[1:2]
    ranked = run_json("search", "name OR ada", "--order", "rank")
    assert len(ranked) == len(run_json("search", "name", "OR", "ada"))
    assert run_json("search", "name", "--since", "1h", "--tag", "ships") == hits
    assert run_json("search", "name", "--until", "1h") == []
    assert run_command("search", "name", "--since", "soon").exit_code == 2


def test_export_and_import_are_lossless(server: TestServer, tmp_path: Path) -> None:
    """A second export has the same lines, and a truncated file changes nothing."""
    lines = run_command("export", "harbour").stdout
    assert all(json.loads(line) for line in lines.splitlines())
    file = tmp_path / "out.jsonl"
    other = str(tmp_path / "other.db")
    summary = run_json("export", "--out", str(file))
    assert summary["conversations"] == 2
    imported = run_json("import", str(file), "--store", other)
    assert {row["title"] for row in imported} == {"harbour", "quay"}
    assert run_command("export", "harbour", "--store", other).stdout == lines
    third = ("import", "-", "--store", str(tmp_path / "third.db"))
    assert run_command(*third, stdin=f"\ufeff{lines}").exit_code == 0
    broken = run_command("import", "-", "--store", other, stdin=lines[: len(lines) // 2])
    assert broken.exit_code == 1
    assert len(run_json("conversations", "--store", other)) == 2
    assert run_command("export", "harbour", "--json").exit_code == 2


def test_failed_export_retains_the_last_one(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is replaced when the new one is complete, with the same permissions."""
    file = tmp_path / "out.jsonl"
    file.write_text("the last backup")
    file.chmod(0o600)

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        failed = run_command("export", "--out", str(file))
    assert failed.exit_code == 1
    assert f"Error: {file}: No space left on device" in failed.stderr
    assert file.read_text() == "the last backup"
    assert [each.name for each in tmp_path.glob("out.*")] == ["out.jsonl"]
    assert run_json("export", "--out", str(file))["conversations"] == 2
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("server")
def test_an_export_is_private_and_follows_no_planted_link(tmp_path: Path) -> None:
    """Only the owner can read a new export, and a link with the name of a temporary file is not followed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("out.jsonl.part", ".out.jsonl.part", "out.jsonl.tmp"):
        (tmp_path / name).symlink_to(victim)
    file = tmp_path / "out.jsonl"
    old = os.umask(0)
    try:
        assert run_json("export", "--out", str(file))["conversations"] == 2
    finally:
        os.umask(old)
    assert victim.read_text() == "precious"
    assert not file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("server")
def test_export_and_batch_do_not_replace_a_database(store_path: Path, tmp_path: Path) -> None:
    """An output file that is the store, or the database of a server, is rejected and unchanged."""
    other = tmp_path / "server.db"
    other.write_bytes(store_path.read_bytes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    for path in (store_path, other):
        for command in (["export"], ["batch", str(prompts)]):
            failed = run_command(*command, "--out", str(path))
            assert failed.exit_code == 1, failed.output
            assert "is a database; choose another output file" in failed.stderr
    absent = tmp_path / "absent.db"
    failed = run_command("batch", str(prompts), "--out", str(absent), "--store", str(absent))
    assert (failed.exit_code, absent.exists()) == (1, False)
    assert run_json("verify")["ok"]


def test_messages_of_chat_completions_are_imported() -> None:
    """A list of messages, an object with messages, or lines of these become conversations."""
    for text, count in (
        (json.dumps(CHAT, indent=2), 1),
        (json.dumps({"messages": CHAT, "tools": []}, indent=2), 1),
        (f"{json.dumps(CHAT)}\n\n{json.dumps({'messages': CHAT})}\n", 2),
    ):
        imported = run_json("import", "-", stdin=text)
        assert len(imported) == count
        for row in imported:
            blocks = run_json("show", row["id"])["blocks"]
            assert [block["kind"] for block in blocks] == ["system", "user", "assistant"]


def test_empty_name_is_no_conversation() -> None:
    """The name of an unset variable does not select a conversation without a title."""
    run_json("import", "-", stdin=json.dumps(CHAT))
    for arguments in (["show"], ["undo"], ["delete", "--yes"], ["export"]):
        assert "there is no conversation ''" in run_command(*arguments, "").stderr
    assert len(run_json("conversations")) == 1


ARGUMENTS = {
    **{name: ["harbour"] for name in ("show", "tree", "inspect", "undo", "redo", "fork")},
    "settings": ["harbour"],
    "diff": ["harbour", "3"],
    "rename": ["quay", "pier"],
    "tag": ["harbour", "x"],
    "search": ["Ada"],
    "archive": ["pier"],
    "delete": ["pier", "--yes"],
    "chat": ["Hello", "--model", "practice"],
    "export": ["--out", "lines.jsonl"],
    "import": ["lines.jsonl", "--store", "other.db"],
}
"""The arguments of the documented commands that need some."""


def test_json_has_the_documented_members(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table in docs/cli.md has the members of each command's output."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    section = page.partition("### JSON\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z].*?) \| (.*) \|$", section, re.MULTILINE)
    documented = {
        name: (members.startswith("list: "), re.findall(r"`(\w+)`", members.partition(";")[0]))
        for names, members in rows
        for name in re.findall(r"`([a-z]+)", names)
    }
    assert set(ARGUMENTS) < set(documented)
    for name, (is_list, members) in documented.items():
        value = json.loads(run_command(name, *ARGUMENTS.get(name, ()), "--json").stdout)
        assert isinstance(value, list) == is_list
        found = list(value[0] if is_list else value)
        assert found == [each for each in members if (name, each) != ("inspect", "file")], name


def test_import_of_nothing_is_reported() -> None:
    """An empty file is no error; an invalid message is named with its position, and nothing is imported."""
    assert run_json("import", "-", stdin="") == []
    for text in ("\n", "[]", '{"messages": []}', "[]\n[]"):
        assert "Nothing was imported" in run_command("import", "-", stdin=text).stdout
    lines = [json.dumps(CHAT), json.dumps({"messages": [{"role": "user"}]})]
    done = run_command("import", "-", stdin="\n".join(lines))
    assert done.exit_code == 1
    assert "chat 2: messages[0]: a message has no content; nothing was imported" in done.stderr
    assert run_json("conversations") == []


def test_interrupted_import_of_messages_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second chat cannot be stored, the first one is not stored either."""
    calls = 0

    def fail_second(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StoreFull("no space left")
        return insert_node(*args, **options)

    monkeypatch.setattr("kedge.store.changes.insert_node", fail_second)
    done = run_command("import", "-", stdin=f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}")
    assert (done.exit_code, calls) == (1, 2)
    assert run_json("conversations") == []


def test_imported_server_address_needs_confirmation(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chat, inspect and verify use an address from a store only if it was given on this machine."""
    lines = run_command("export", "harbour").stdout
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "foreign.db"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another machine"))
    monkeypatch.setenv("KEDGE_API_KEY", "planted")
    run_json("import", "-", stdin=lines)
    before = len(server.requests)
    for command in (("chat", "-c", "harbour"), ("inspect", "harbour")):
        done = run_command(*command, stdin="Hello\n")
        assert done.exit_code == 1
        assert "not used on this machine before: model at responses:http://127" in done.stderr
        assert "--model" in done.stderr
    (audit,) = run_json("verify", "--server")["audits"]
    assert audit["agrees"] is None
    assert "not used on this machine before" in audit["words"]
    named = run_command("verify", "harbour", "--server")
    assert named.exit_code == 1
    assert "not used on this machine before" in named.output
    assert len(server.requests) == before
    address = f"responses:{server.base_url}#practice"
    assert run_command("inspect", "harbour", "--model", address).exit_code == 0
    assert run_json("inspect", "harbour")["model"] == address


def test_verify_checks_the_store_and_the_server(store_path: Path) -> None:
    """Agreement is reported, and a changed block is damage with exit code 1."""
    with serve_sample_store(store_path) as server:
        report = run_json("verify", "--server")
        assert report["ok"]
        assert [audit["agrees"] for audit in report["audits"]] == [True, True]
        assert "agrees  harbour" in run_command("verify", "harbour", "--server").output
        server.forget()
        verified = run_json("verify", "harbour", "--server")
        assert verified["audits"][0]["agrees"] is None
    execute(store_path, "UPDATE blocks SET body = replace(body, 'Ada', 'Bob')")
    unknown = run_command("verify", "nope")
    assert unknown.exit_code == 1
    assert "there is no conversation 'nope'" in unknown.stderr
    wrong = run_command("verify")
    assert wrong.exit_code == 1
    assert "damaged" in wrong.output
    assert json.loads(run_command("verify", "--json").stdout)["ok"] is False


def test_names_are_completed(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Titles and ids are completed, and a missing store has no completions."""
    context = click.Context(group)
    parameter = click.Argument(["conversation"])
    assert complete_names(context, parameter, "har") == ["harbour"]
    assert len(complete_names(context, parameter, "conv_")) == 2
    monkeypatch.setenv("KEDGE_STORE", "/nowhere/at/all.db")
    assert complete_names(context, parameter, "") == []


def test_delete_needs_confirmation_and_retains_forks(server: TestServer) -> None:
    """No input is not a confirmation, and a fork retains the blocks that it shares."""
    before = run_json("show", "quay")
    unanswered = run_command("delete", "harbour")
    assert unanswered.exit_code == 2
    assert "--yes deletes without a question" in unanswered.stderr
    assert run_command("delete", "harbour", stdin="n\n").exit_code == 1
    assert len(run_json("conversations")) == 2
    assert run_json("delete", "harbour", "--yes")["deleted"]
    assert [each["title"] for each in run_json("conversations")] == ["quay"]
    assert run_json("show", "quay")["blocks"] == before["blocks"]
    assert run_json("verify")["damage"] == []


def test_old_conversations_are_deleted(server: TestServer, store_path: Path) -> None:
    """Conversations are deleted by age and tag, after a confirmation."""
    assert run_json("delete", "--older-than", "1h", "--yes")["deleted"] == []
    execute(store_path, *TWO_HOURS_LATER)
    other = run_json("delete", "--older-than", "1h", "--tag", "planes", "--yes")
    assert other["deleted"] == []
    declined = run_command("delete", "--older-than", "1h", stdin="n\n")
    assert declined.exit_code == 1
    assert "Delete 2 conversations permanently?" in declined.stderr
    asked = "UPDATE nodes SET created_at = created_at + 7200 WHERE conversation = 2"
    execute(store_path, asked)  # a question that is being answered
    assert "Delete 1 conv" in run_command("delete", "--older-than", "1h", stdin="n\n").stderr
    assert run_command("undo", "quay").exit_code == 0  # changes its time of update
    deleted = run_command("delete", "--older-than", "1h", stdin="y\n")
    assert "1 conversation deleted" in deleted.stdout
    (quay,) = run_json("conversations")
    assert (quay["title"], quay["ttl"]) == ("quay", None)
    assert run_command("delete", "quay", "--tag", "ships").exit_code == 2
    assert run_command("delete").exit_code == 2
    assert run_command("delete", "quay", "--older-than", "1h").exit_code == 2
    assert run_command("delete", "--older-than", "0d").exit_code == 2


def test_conversation_expires_after_its_ttl(store_path: Path) -> None:
    """``--ttl`` sets or replaces the time to live, and gc deletes expired conversations."""
    chat = ("chat", "--model", "practice", "-c", "guest")
    for ttl, seconds in (("12h", 43_200.0), ("30m", 1_800.0)):
        assert run_command(*chat, "--ttl", ttl, stdin="What is 2+3?\n").exit_code == 0
        assert [row["ttl"] for row in run_json("conversations")] == [seconds]
    assert run_command(*chat, "--ttl", "soon", stdin="").exit_code == 2
    execute(store_path, *TWO_HOURS_LATER)
    (expired,) = run_json("gc", "--dry-run")["conversations"]
    assert expired in run_command("gc", "--dry-run").output
    assert [row["id"] for row in run_json("conversations")] == [expired]
    assert run_command("gc").exit_code == 0
    assert run_json("conversations") == []
