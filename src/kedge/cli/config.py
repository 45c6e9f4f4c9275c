"""``kedge config``: the settings that hold, and where each came from; secrets are masked."""

from pathlib import Path
from typing import Any

from kedge.cli.frame import command as kedge_command
from kedge.cli.frame import config_of
from kedge.cli.output import dim, say, say_json, table
from kedge.config import Value


@kedge_command("config", short_help="Show the settings that hold, and where each came from.")
def command(as_json: bool) -> None:
    """Show the settings that hold, and where each came from.

    A flag of a command beats the environment, the environment beats the file, the file the default.
    """
    config = config_of()
    values = list(config)
    if as_json:
        settings = {value.setting.name: _report(value) for value in values}
        say_json({"file": str(config.path), "exists": config.path.exists(), "settings": settings})
        return
    state = "" if config.path.exists() else " (not there; everything has its default)"
    say(f"{dim('file')}  {config.path}{dim(state)}")
    say()
    table(
        ("setting", "value", "from", "variable"),
        [(v.setting.name, _words(v), _where(v, config.path), dim(v.setting.env)) for v in values],
    )


def _words(value: Value) -> str:
    return value.shown or dim(f"({value.setting.default_words})")


def _where(value: Value, path: Path) -> str:
    return value.source if value.source != "file" else path.name


def _report(value: Value) -> dict[str, Any]:
    return {
        "value": value.shown if value.setting.secret else value.value,
        "source": value.source,
        "place": value.place,
        "variable": value.setting.env,
        "help": value.setting.help,
    }
