"""What every command shares: JSON, errors of one line, exit codes, help that loads nothing."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kedge.cli import COMMANDS, base, group, module_name
from kedge.cli.base import command, print_table, setting_option
from kedge.errors import CannotConnect, KedgeError

DOCS = Path(__file__).parents[2] / "docs"
HEAVY_MODULES = {
    "anyio", "asyncio", "httpx2", "jinja2", "kedge.engines", "kedge.server", "kedge.turns", "openai",
    "prometheus_client", "pydantic", "rich", "sqlite3", "starlette", "tiktoken", "tomllib",
}  # fmt: skip


def run_kedge(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real command."""
    return subprocess.run(
        [sys.executable, "-m", "kedge", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environ},
    )


def load_commands() -> list[tuple[str, click.Command]]:
    """Every command, imported; those of a group one by one."""
    found: list[tuple[str, click.Command]] = []
    for name in COMMANDS:
        made = import_module(module_name(name)).command
        found.append((name, made))
        if isinstance(made, click.Group):
            found += [(f"{name} {inner}", each) for inner, each in made.commands.items()]
    return found


def test_help_lists_every_command_and_loads_none_of_them() -> None:
    """``kedge --help`` is quick because it imports nothing that it does not show."""
    code = (
        "import sys, kedge.cli\n"
        "try: kedge.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = " ".join(done.stdout.split())
    for name, line in COMMANDS.items():
        assert f"{name} {line}" in shown
    loaded = set(done.stderr.split())
    assert loaded & HEAVY_MODULES == set()
    assert {name for name in loaded if name.startswith("kedge")} == {"kedge", "kedge.cli"}


@pytest.mark.parametrize("first", COMMANDS)
def test_every_command_can_answer_in_json_and_say_more(first: str) -> None:
    """And its line in the list is the one of its own help."""
    for name, made in load_commands():
        if name.split()[0] == first:
            options = {flag for param in made.params for flag in param.opts}
            assert {"--json", "-v"} <= options or isinstance(made, click.Group)
            assert made.get_short_help_str(200) == COMMANDS.get(name, made.short_help)
            assert CliRunner().invoke(made, ["--help"]).exit_code == 0


def test_every_command_and_option_is_documented() -> None:
    """On the page of the command line; those of ``serve`` on the server's page."""
    page = (DOCS / "cli.md").read_text() + (DOCS / "server.md").read_text()
    missing = [
        f"{name} {flag}"
        for name, made in load_commands()
        for param in made.params
        for flag in (param.opts if isinstance(param, click.Option) else [name])
        if flag.startswith("--") and f"`{flag}" not in page
    ]
    assert missing == []
    assert [name for name, _ in load_commands() if f"`kedge {name}" not in page] == []


def test_an_unknown_command_is_a_wrong_use_with_a_guess() -> None:
    """Exit code 2, one line, and what was probably meant."""
    done = run_kedge("confg")
    assert done.returncode == 2
    assert "there is no command 'confg'; did you mean config?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "lists the commands" in run_kedge("qqqqqq").stderr


def make_failing_command(error: Exception) -> click.Command:
    """A command that fails with this error."""

    @command("failing")
    def made(as_json: bool) -> None:
        raise error

    return made


def test_an_error_of_ours_is_one_line_and_a_hint() -> None:
    """Exit code 1; -v adds the traceback; --json makes an object of it."""
    made = make_failing_command(CannotConnect("no key\nfor openai"))
    plain = CliRunner().invoke(made)
    assert plain.exit_code == 1
    assert plain.stderr.splitlines()[0] == "Error: no key for openai"
    assert plain.stderr.splitlines()[1].startswith("Hint: ")
    assert len(plain.stderr.splitlines()) == 2
    assert "Traceback" in CliRunner().invoke(made, ["-v"]).stderr
    told = json.loads(CliRunner().invoke(made, ["--json"]).stderr)
    assert told == {
        "error": "no key for openai",
        "kind": "CannotConnect",
        "hint": told["hint"],
    }


def test_a_mistake_of_kedge_itself_is_told_without_quoting() -> None:
    """Its words may hold anything, so they are shown only to those who ask with -v."""
    made = make_failing_command(ValueError("planted words"))
    plain = CliRunner().invoke(made)
    assert plain.exit_code == 1
    assert "internal error: ValueError" in plain.stderr
    assert "planted" not in plain.stderr
    assert "planted" in CliRunner().invoke(made, ["-v"]).stderr


def test_an_error_without_advice_is_one_line_only() -> None:
    """A hint is given where there is one."""
    assert CliRunner().invoke(make_failing_command(KedgeError("no"))).stderr == "Error: no\n"


def test_settings_become_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flag, else the environment, else the file, else the default, each checked."""

    @command("made")
    @setting_option("serve.port")
    @setting_option("trace")
    def made(port: int, trace: bool, as_json: bool) -> None:
        click.echo(f"{port} {trace} {click.get_current_context().meta[base.SOURCES_KEY]}")

    def run(*words: str) -> str:
        result = CliRunner().invoke(made, words)
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


def test_logs_are_shown_to_those_who_ask() -> None:
    """-vv shows what was sent, and as JSON if so configured."""
    words = [sys.executable, "-m", "kedge", "-vv", "chat"]
    loud = subprocess.run(
        words,
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "KEDGE_LOG_FORMAT": "json"},
    )
    told = [json.loads(line) for line in loud.stderr.splitlines()]
    assert any(each["message"].startswith("request sent") for each in told)
    assert all(each["level"] != "debug" for each in told)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour reaches a terminal only, and not where NO_COLOR is set."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    styled = CliRunner().invoke(group, ["config"], color=True)
    assert "\x1b[" in styled.output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in CliRunner().invoke(group, ["config"], color=True).output


def test_a_reader_that_has_enough_is_no_error() -> None:
    """``kedge config | head -1`` ends without a word."""
    pipe = f"{sys.executable} -m kedge config | head -1"
    done = subprocess.run(["sh", "-c", pipe], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("file")
    assert done.stderr == ""


def test_tables_align_and_leave_pipes_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are as wide as need be; only a terminal cuts the last one."""
    print_table(("a", "b"), [("1", "x" * 200), ("22", "multi\nline")])
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "a   b"
    assert second == f"1   {'x' * 200}"
    assert third == "22  multi line"
    print_table(("a", "b"), [("1", "x" * 200)], width=40)
    assert capsys.readouterr().out.splitlines()[1].endswith("…")
