"""No command writes control characters of stored data, of files or of servers to the terminal."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.sample_store import run_command, serve_sample_store
from kedge._internal.display import escape_json, escape_text, sanitize_styled, sanitize_text
from kedge.cli import group

HOSTILE = (
    "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[8mhid\x9b5m\x9d0;t\x9c\u202eevil\u2066\u200f\rCR\x7f\x08"
)
"""A clipboard write (OSC 52), erasing and hiding (CSI), C1 controls, bidirectional overrides, a carriage return."""
STYLE = re.compile(r"\x1b\[(?:[0-2]|3[1-6])m")


def check_output(output: str) -> None:
    """Check that an output has no control characters but line breaks, tabs and styles of Kedge."""
    plain = STYLE.sub("", output)
    assert [c for c in plain if not c.isprintable() and c not in "\n\t"] == []


FREE_TEXTS = {"title", "tags", "text", "reason", "error", "model", "anchor", "scope", "name"}


def spoil(value: Any, name: str = "") -> Any:
    """Return an exported value with hostile characters in each text that may have any content."""
    if isinstance(value, dict):
        return {key: spoil(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [spoil(each, name) for each in value]
    return value + HOSTILE if isinstance(value, str) and name in FREE_TEXTS else value


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with a store ``kedge.db`` of hostile data, and its export ``export.jsonl``."""
    folder = tmp_path_factory.mktemp("hostile")
    with serve_sample_store(folder / "clean.db"):
        exported = run_command("export", "harbour", "--store", str(folder / "clean.db")).stdout
        lines = [spoil(json.loads(line)) for line in exported.splitlines()]
        for line in lines:
            if response := line.get("response"):
                del response["digest"]  # of the texts before
                response |= {"reason": f"x{HOSTILE}", "status": "failed", "error": HOSTILE}
        calls = [
            {"kind": "tool_call", "id": "blk_c", "name": f"t{HOSTILE}", "arguments": HOSTILE, "call_id": "c"},
            {"kind": "tool_result", "id": "blk_r", "call_id": "c", "parts": [{"type": "text", "text": HOSTILE}]},
        ]  # fmt: skip
        blocks = [line for line in lines if "block" in line]
        lines[len(blocks) + 1 : len(blocks) + 1] = [{"block": each} for each in calls]
        count = len(blocks)
        lines[-1]["blocks"] += [count, count + 1]
        path = folder / "export.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        imported = run_command("import", str(path), "--store", str(folder / "kedge.db"))
        assert imported.exit_code == 0, imported.output
        yield folder


TITLE = f"harbour{HOSTILE}"
MODEL = ("--model", "practice")
ONCE = (*MODEL, "--rounds", "1")
COMMANDS: dict[str, list[list[str]]] = {
    "chat": [["chat", "-c", TITLE, "Hello"], ["chat", "--no-save", "--model", "practice", f"Say {HOSTILE}"]],
    "conversations": [["conversations"]],
    "show": [["show", TITLE], ["show", TITLE, "--full"]],
    "tree": [["tree", TITLE]],
    "inspect": [["inspect", TITLE], ["inspect", TITLE, "--say", HOSTILE]],
    "diff": [["diff", TITLE, "3", "5"], ["diff", TITLE, "5", "7"]],
    "fork": [["fork", TITLE], ["fork", TITLE, "--title", f"f{HOSTILE}"]],
    "undo": [["undo", TITLE]],
    "redo": [["redo", TITLE]],
    "rename": [["rename", TITLE, f"x{HOSTILE}"], ["rename", f"x{HOSTILE}", TITLE]],
    "tag": [["tag", TITLE, f"tag{HOSTILE}"], ["tag", TITLE, "--remove", f"tag{HOSTILE}"]],
    "archive": [["archive", TITLE], ["archive", TITLE, "--restore"]],
    "settings": [["settings", TITLE], ["settings", TITLE, "--ttl", HOSTILE]],
    "search": [["search", "Ada"], ["search", "evil"], ["search", HOSTILE]],
    "export": [["export", TITLE]],
    "import": [["import", "EXPORT"], ["import", "BROKEN"]],
    "delete": [["delete", HOSTILE, "--yes"], ["delete", TITLE]],
    "verify": [["verify"], ["verify", TITLE, "--server"]],
    "gc": [["gc"]],
    "run debate": [
        ["run", "debate", "--question", HOSTILE, "--side", "a", "--side", "b", "--rubric", HOSTILE, *ONCE],
    ],
    "run refine": [
        ["run", "refine", "--task", f"Say {HOSTILE}", "--rubric", HOSTILE, *ONCE],
        ["run", "refine", "--resume", "--id", HOSTILE],
    ],
    "run steps": [["run", "steps", "STEPS", *MODEL, "--input", HOSTILE]],
    "batch": [["batch", "PROMPTS", "--out", "OUT", *MODEL], ["batch", "BROKEN", "--out", "OUT2", *MODEL]],
    "stats": [["stats"], ["stats", "--model", f"practice{HOSTILE}"]],
    "serve": [["serve", "--models", "BROKEN"], ["serve", "--fault", HOSTILE]],
    "auth add": [["auth", "add", f"n{HOSTILE}"], ["auth", "add", "plain", "--user", f"u{HOSTILE}"]],
    "auth list": [["auth", "list"]],
    "auth revoke": [["auth", "revoke", f"n{HOSTILE}"]],
    "mcp": [["mcp", "--model", f"no:{HOSTILE}"]],
    "proxy": [["proxy", "--upstream", f"nothing{HOSTILE}"]],
    "config": [["config"]],
    "doctor": [["doctor"]],
    "completion": [["completion", "bash"]],
}  # fmt: skip
WITHOUT_STORE = ("proxy", "config", "doctor", "completion")


def list_commands(command: click.Group, prefix: str = "") -> Iterator[str]:
    """Yield the names of all commands."""
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if isinstance(found, click.Group):
            yield from list_commands(found, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def test_every_command_is_tested() -> None:
    """The table contains each command of the command line."""
    assert sorted(COMMANDS) == sorted(list_commands(group))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_control_characters(
    spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, as_json: bool
) -> None:
    """Each command shows hostile data without control characters, in its output and in its errors."""
    store = tmp_path / "kedge.db"
    store.write_bytes((spoiled / "kedge.db").read_bytes())
    config = tmp_path / "config.toml"
    config.write_text(f"model = {json.dumps('practice' + HOSTILE)}\n", encoding="utf-8")
    if name in ("config", "doctor"):
        monkeypatch.setenv("KEDGE_CONFIG", str(config))
    files = {
        "EXPORT": (spoiled / "export.jsonl").read_text(encoding="utf-8"),
        "BROKEN": json.dumps({f"a{HOSTILE}": HOSTILE}),
        "STEPS": f"[[steps]]\nname = 'one'\nprompt = {json.dumps('Say ' + HOSTILE)}\n",
        "PROMPTS": "".join(json.dumps({"id": f"{n}{HOSTILE}", "prompt": HOSTILE}) + "\n" for n in "ab"),
    }  # fmt: skip
    suffixes = {"STEPS": ".toml"}
    for key, text in files.items():
        (tmp_path / f"{key}{suffixes.get(key, '.jsonl')}").write_text(text, encoding="utf-8")
    for arguments in COMMANDS[name]:
        known = [*files, "OUT", "OUT2"]
        paths = [
            str(tmp_path / f"{each}{suffixes.get(each, '.jsonl')}") if each in known else each
            for each in arguments
        ]
        stored = [] if name in WITHOUT_STORE else ["--store", str(store)]
        result = CliRunner().invoke(
            group, [*paths, *stored, *(["--json"] if as_json else [])], color=True, input=""
        )
        check_output(result.stdout)
        check_output(result.stderr)


def test_the_hostile_data_is_shown(spoiled: Path) -> None:
    """The commands do show the text beside the control characters, so that the tests above test something."""
    store = str(spoiled / "kedge.db")
    shown = (["conversations"], ["show", TITLE], ["tree", TITLE], ["search", "Ada"], ["stats"])
    for arguments in shown:
        result = run_command(*arguments, "--store", store)
        assert result.exit_code == 0, result.output
        assert "evil" in result.output, arguments


def test_the_functions_for_untrusted_text() -> None:
    """Each function leaves no control characters, and JSON keeps its value."""
    for text in (sanitize_text(HOSTILE), escape_text(HOSTILE), sanitize_styled(HOSTILE)):
        check_output(text)
    styled = click.style("a", fg="red", bold=True) + click.style("b", dim=True)
    assert sanitize_styled(styled) == styled
    encoded = escape_json(json.dumps({"a": HOSTILE + "\U000e0001"}, ensure_ascii=False))
    check_output(encoded)
    assert json.loads(encoded) == {"a": HOSTILE + "\U000e0001"}
