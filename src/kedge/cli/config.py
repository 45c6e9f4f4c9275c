"""``kedge config``: show the settings in effect; secrets are masked."""

from pathlib import Path
from typing import Any

from kedge.cli.base import command as kedge_command
from kedge.cli.base import dim, echo, echo_json, get_config, print_table
from kedge.config import SettingValue


@kedge_command("config", short_help="Show the settings in effect and where each came from.")
def command(as_json: bool) -> None:
    """Show the settings in effect and where each came from.

    An option overrides the environment, the environment overrides the file, the file overrides the default.
    """
    config = get_config()
    values = list(config)
    if as_json:
        settings = {value.setting.name: _value_to_json(value) for value in values}
        echo_json({"file": str(config.path), "exists": config.path.exists(), "settings": settings})
        return
    state = "" if config.path.exists() else " (does not exist; defaults apply)"
    echo(f"{dim('file')}  {config.path}{dim(state)}")
    echo()
    print_table(
        ("setting", "value", "from", "variable"),
        [
            (v.setting.name, _format_value(v), _format_source(v, config.path), dim(v.setting.env))
            for v in values
        ],
    )


def _format_value(value: SettingValue) -> str:
    return value.display_value or dim(f"({value.setting.default_text})")


def _format_source(value: SettingValue, path: Path) -> str:
    return value.source if value.source != "file" else path.name


def _value_to_json(value: SettingValue) -> dict[str, Any]:
    return {
        "value": value.display_value if value.setting.secret else value.value,
        "source": value.source,
        "place": value.location,
        "variable": value.setting.env,
        "help": value.setting.help,
    }
