"""Tests of what all commands share: JSON, one-line errors, exit codes, and help without imports."""

import gzip
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cli.sample_store import run_command
from kedge.cli import group
from kedge.cli.base import (
    find_hint,
    get_setting,
    kedge_command,
    print_table,
    setting_option,
    wrap_text,
)
from kedge.cli.commands import COMMANDS, SYNONYMS, load_command
from kedge.errors import CannotConnect, InvalidSetting, KedgeError

DOCS = Path(__file__).parents[2] / "docs"
HEAVY_MODULES = {
    "anyio", "asyncio", "httpx2", "jinja2", "kedge.engines", "kedge.server", "kedge.turns", "openai",
    "prometheus_client", "pydantic", "rich", "sqlite3", "starlette", "tiktoken", "tomllib",
}  # fmt: skip


def run_kedge(
    *arguments: str, prefix: Sequence[str] = (), text: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process."""
    return subprocess.run(
        [*prefix, sys.executable, "-m", "kedge", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environ},
    )


def load_commands() -> list[tuple[str, click.Command]]:
    """Return every command with its name, including the commands of groups."""
    commands: list[tuple[str, click.Command]] = []
    for name in COMMANDS:
        click_command = load_command(name)
        commands.append((name, click_command))
        if isinstance(click_command, click.Group):
            commands += [
                (f"{name} {inner}", each) for inner, each in click_command.commands.items()
            ]
    return commands


def test_read_only_store_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that only read work, and writing is an error with a hint."""
    created = run_command("chat", "-c", "quay", stdin="My name is Ada.\n")
    assert created.exit_code == 0, created.output
    monkeypatch.setenv("KEDGE_STORE", f"sqlite:///{tmp_path}/kedge/kedge.db?mode=ro")
    for command in (["conversations"], *([name, "quay"] for name in ("show", "tree", "inspect"))):
        read = run_command(*command)
        assert read.exit_code == 0, read.output
        assert "quay" in read.stdout or "Ada" in read.stdout
    failed = run_command("chat", "-c", "quay", stdin="Hello\n")
    assert failed.exit_code == 1
    assert "the database may only be read" in failed.stderr
    assert "Hint: Check the permissions" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "-c", "quay"], "Not a directory"),
        (["import", "-"], "the text is not UTF-8"),
        (["export", "--out", "/no/such/folder/file"], "No such file or directory"),
        (["export", "--out", "/"], "Is a directory"),
    ],
)
def test_environment_problems_are_not_internal_errors(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file problem is reported with a message and a hint."""
    if "export" in arguments:
        run_command("chat", "-c", "quay", stdin="Hello\n")
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    result = CliRunner().invoke(group, arguments, input=b"caf\xe9\n")
    assert result.exit_code == 1
    error, hint = result.stderr.splitlines()[-2:]
    assert message in error
    assert "internal" not in error
    assert hint.startswith("Hint: ")


@pytest.mark.parametrize("arguments", [["config"], ["--help"]])
def test_full_disk_is_reported(arguments: list[str]) -> None:
    """A full disk behind standard output is reported with a hint."""
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = [sys.executable, "-m", "kedge", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "Error: No space left on device\nHint: Free some space, or use another disk.\n"
    )


def test_command_runs_with_closed_standard_streams() -> None:
    """A command succeeds if its standard streams are closed, as in some services."""
    command = ["sh", "-c", 'exec "$0" -m kedge config --json <&- >&- 2>&-', sys.executable]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_output_in_other_encodings_has_replacements(encoding: str) -> None:
    """Symbols and lines become ASCII, other text a question mark, and JSON is escaped."""
    lines = "Grüße von der Küste \u4e16\n/undo\nHello\n".encode()
    assert CliRunner().invoke(group, ["chat", "-c", "quay"], input=lines).exit_code == 0
    runner = CliRunner(charset=encoding)

    def run(*arguments: str) -> str:
        result = runner.invoke(group, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout_bytes.decode(encoding)

    assert "+ python" in run("doctor")
    header, row = run("conversations").splitlines()
    short, _, rest = row.partition(" ")
    assert (
        row[header.index("responses") - 1 :] == f" {rest.lstrip()}"
    )  # aligned with the replacement
    assert run("show", short) == run("show", "quay")
    tree = run("tree", "quay")
    assert "* " in tree
    assert "Grüße von der Küste ?".encode(encoding, "replace").decode(encoding) in tree
    assert "> would be sent" in run("inspect", "quay")
    assert "#" in run("stats")
    assert "\\u4e16" in run("show", "quay", "--at", "3", "--json")
    assert "\u4e16" in runner.invoke(group, ["export"]).stdout_bytes.decode("utf-8")


def test_text_is_wrapped_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines are broken between words and columns truncated only on a terminal; columns fit their content."""
    text = "the conversation is stored\nunder " + "x" * 50
    assert wrap_text(text) == text
    print_table(("a", "b"), [("1", "x" * 200), ("22", "multi\nline")])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "a   b"
    assert second == f"1   {'x' * 200}"
    assert third == "22  multi line"
    print_table(("a", "b"), [("1", "x" * 200)], width=40)
    assert capsys.readouterr().out.splitlines()[1].endswith("…")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    lines = wrap_text(text, indent="  ").split("\n")
    assert lines == ["the conversation is", "  stored", "under", "  " + "x" * 50]


def list_imports(*arguments: str) -> tuple[str, set[str]]:
    """Run the command in a separate process and return its output and the modules that it imported."""
    code = (
        "import sys, kedge.cli\n"
        f"try: kedge.cli.main({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout, set(done.stderr.split())


def test_help_lists_every_command_without_importing_it() -> None:
    """``kedge --help`` is fast because it imports no command, and that of a command because it imports little."""
    output, loaded = list_imports("--help")
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in " ".join(output.split())
    assert (loaded | list_imports("chat", "--help")[1]) & HEAVY_MODULES == set()
    assert {name for name in loaded if name.startswith("kedge")} == {
        "kedge",
        "kedge.cli",
        "kedge.cli.commands",
    }


def find_section(name: str) -> str:
    """Return the documentation of a command: the common part and each section that names it."""
    common, *sections = re.split(r"^## ", (DOCS / "cli.md").read_text(), flags=re.MULTILINE)
    sections_of_command = [each for each in sections if re.search(rf"`kedge {name}\b", each)]
    if name == "serve":
        sections_of_command.append((DOCS / "server.md").read_text())
    return "".join([common, *sections_of_command]) if sections_of_command else ""


def list_options(click_command: click.Command) -> list[str]:
    """Return the long options of a command."""
    options = [param for param in click_command.params if isinstance(param, click.Option)]
    return [flag for param in options for flag in param.opts if flag.startswith("--")]


def test_every_command_and_option_is_documented() -> None:
    """Every option is described, in a section of docs/cli.md that names its command, and ``--store`` uniformly."""
    missing = [
        f"{name} {flag}"
        for name, click_command in load_commands()
        for flag in list_options(click_command)
        if not re.search(rf"`{flag}\b", find_section(name))
    ]
    assert missing == []
    assert [name for name, _ in load_commands() if not find_section(name)] == []
    assert find_section("no-such-command") == ""
    options = [
        param
        for _, click_command in load_commands()
        for param in click_command.params
        if isinstance(param, click.Option)
    ]
    assert [param.opts for param in options if not param.help] == []
    stores = {(param.metavar, param.help) for param in options if "--store" in param.opts}
    assert len(stores) == 1


def test_unknown_command_has_a_suggestion() -> None:
    """An unknown command exits with code 2 and one line with the most similar command."""
    done = run_kedge("confg")
    assert done.returncode == 2
    assert "there is no command 'confg'; did you mean config?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "lists the commands" in run_command("qqqqqq").stderr
    assert "did you mean conversations?" in run_command("ls").stderr
    assert set(SYNONYMS.values()) <= set(COMMANDS)
    assert not set(SYNONYMS) & set(COMMANDS)


def make_failing_command(error: Exception) -> click.Command:
    """Return a command that fails with this error."""

    @kedge_command("failing")
    def click_command() -> None:
        raise error

    return click_command


def test_errors_are_one_line_and_a_hint() -> None:
    """The exit code is 1, ``-v`` adds the traceback, ``--json`` prints an object; only ``-v`` shows user data."""
    click_command = make_failing_command(CannotConnect("no key\nfor openai"))
    plain = CliRunner().invoke(click_command)
    assert plain.exit_code == 1
    assert plain.stderr.splitlines()[0] == "Error: no key for openai"
    assert plain.stderr.splitlines()[1].startswith("Hint: ")
    assert "Traceback" in CliRunner().invoke(click_command, ["-v"]).stderr
    records = json.loads(CliRunner().invoke(click_command, ["--json"]).stderr)
    text = {"error": "no key for openai", "kind": "CannotConnect"}
    assert records == {**text, "hint": records["hint"]}
    click_command = make_failing_command(KedgeError("it answered \x1b]0;x\x07"))
    assert CliRunner().invoke(click_command).stderr == "Error: it answered �]0;x�\n"
    click_command = make_failing_command(ValueError("planted words"))
    plain = CliRunner().invoke(click_command)
    assert plain.exit_code == 1
    assert "internal error: ValueError" in plain.stderr
    assert "planted" not in plain.stderr
    assert "planted" in CliRunner().invoke(click_command, ["-v"]).stderr
    result = CliRunner().invoke(make_failing_command(sqlite3.OperationalError("disk I/O error")))
    assert "SQLite reports: disk I/O error" in result.stderr


def test_hint_of_errors_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid value of an argument is no problem of the configuration."""
    click_command = make_failing_command(InvalidSetting("the name of a token must be letters"))
    assert "Hint" not in CliRunner().invoke(click_command).stderr
    monkeypatch.setenv("KEDGE_LOG_LEVEL", "loud")
    failed = CliRunner().invoke(click_command).stderr.splitlines()
    assert failed[0].startswith("Error: KEDGE_LOG_LEVEL must be one of")
    assert failed[1] == "Hint: 'kedge doctor' checks all settings."
    assert "KEDGE_LOG_LEVEL must be" in run_command("doctor").stdout


def test_hint_fits_the_error() -> None:
    """A surrogate in a list is no encoding, an MCP server has no keys, and other text names how to convert it."""
    assert find_hint(InvalidSetting("choose one of lone_surrogate")) == ""
    for content, command_name in (
        ("Hé".encode("utf-16"), "iconv -f utf-16"),
        (gzip.compress(b"[]"), "gunzip"),
        ("été".encode("latin-1"), "iconv -f latin1"),
    ):
        with pytest.raises(UnicodeDecodeError) as caught:
            content.decode()
        assert command_name in find_hint(caught.value)
    assert "--mcp" in find_hint(CannotConnect("the MCP server x is not available: it ended"))


def test_settings_become_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag overrides the environment, which overrides the file, and each value is validated."""

    @kedge_command("made")
    @setting_option("serve.port")
    @setting_option("trace")
    def click_command(port: int, trace: bool) -> None:
        sources = {name: get_setting(name).source for name in ("serve.port", "trace")}
        click.echo(f"{port} {trace} {sources}")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(click_command, arguments)
        return result.output if not result.exit_code else f"{result.exit_code} {result.stderr}"

    file = tmp_path / "config.toml"
    file.write_text("trace = true\n[serve]\nport = 2\n")
    assert run().startswith("8484 False")
    monkeypatch.setenv("KEDGE_CONFIG", str(file))
    assert run() == "2 True {'serve.port': 'file', 'trace': 'file'}\n"
    monkeypatch.setenv("KEDGE_SERVE_PORT", "3")
    assert run("--no-trace").startswith("3 False")
    assert run("--port", "4").startswith("4 True")
    assert run("--port", "x").startswith("2 ")
    monkeypatch.setenv("KEDGE_SERVE_PORT", "many")
    assert "KEDGE_SERVE_PORT must be an integer" in run()
    assert run().startswith("1 Error")


def test_unknown_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is similar to a setting's is noted, or a log record; with ``--json`` there is no note."""
    monkeypatch.setenv("KEDGE_MODLE", "xai:grok-4")
    monkeypatch.setenv("KEDGE_OTHER", "x")
    text = "KEDGE_MODLE is ignored: it is not a setting; did you mean KEDGE_MODEL?"
    assert run_command("chat", "Hi").stderr == f"Note: {text}\n"
    assert run_command("chat", "Hi", "--json").stderr == ""
    environment = {"KEDGE_LOG_FORMAT": "json"}
    logged = CliRunner().invoke(group, ["-v", "chat", "Hi", "--json"], env=environment)
    (record,) = map(json.loads, logged.stderr.splitlines())
    assert (record["level"], record["message"]) == ("warning", text)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colors are printed only on a terminal, and not if NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    styled = CliRunner().invoke(group, ["config"], color=True)
    assert "\x1b[" in styled.output
    assert "\x1b[" in CliRunner().invoke(group, ["show", "nothing"], color=True).stderr
    monkeypatch.setenv("NO_COLOR", "1")
    failed = CliRunner().invoke(group, ["show", "nothing"], color=True)
    assert failed.stderr.startswith("Error: ")
    assert "\x1b[" not in CliRunner().invoke(group, ["config"], color=True).output


def test_closed_output_pipe_is_no_error() -> None:
    """``kedge config | head -1`` prints no error."""
    pipe = f"{sys.executable} -m kedge config | head -1"
    done = subprocess.run(["sh", "-c", pipe], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("file")
    assert done.stderr == ""


def test_ctrl_c_during_an_import(tmp_path: Path) -> None:
    """Ctrl-C before a command has started ends it as later: with a message and exit code 130."""
    (tmp_path / "anyio.py").write_text("raise KeyboardInterrupt")
    done = run_kedge("batch", "in.jsonl", "--out", "o", PYTHONPATH=str(tmp_path))
    expected = "Interrupted. Run the same command again to continue."
    assert (done.returncode, done.stderr.strip()) == (130, expected)
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = run_kedge("config", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")
