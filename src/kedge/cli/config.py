"""``kedge config`` and ``kedge completion``: show the settings in effect, and set up a shell."""

import os
from pathlib import Path
from typing import Any

import click

from kedge.cli.base import (
    CommandError,
    Result,
    dim,
    echo,
    get_config,
    kedge_command,
    print_table,
)
from kedge.config import Config, SettingValue, config_path


@kedge_command("config", tolerant=True)
def command() -> Result:
    """Show the settings in effect and where each came from.

    An option overrides the environment, the environment overrides the file, the file overrides the default. A file
    with a mistake is ignored, and the mistake is reported.
    """
    try:
        config = get_config()
    except CommandError:
        describe_config(Config(config_path(), {}, os.environ)).show()
        raise
    return describe_config(config)


def describe_config(config: Config) -> Result:
    """Return the settings in effect."""
    settings = {value.setting.name: _value_to_json(value) for value in config}
    facts = {"file": str(config.path), "exists": config.path.exists(), "settings": settings}
    value = {**facts, "unknown_variables": config.unknown_variables}
    return Result(value, lambda: _print_config(config))


def _print_config(config: Config) -> None:
    unknown = config.unknown_variables
    state = "" if config.path.exists() else " (does not exist; defaults apply)"
    echo(f"{dim('file')}  {config.path}{dim(state)}")
    echo()
    print_table(
        ("setting", "value", "from", "variable"),
        [
            (v.setting.name, _format_value(v), _format_source(v, config.path), dim(v.setting.env))
            for v in config
        ],
    )
    if unknown:
        echo()
        print_table(("ignored variable", "similar"), unknown.items())


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


COMPLETE_VARIABLE = "_KEDGE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@kedge_command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> Result:
    """Print the completion script for a shell.

    To install it: kedge completion bash >> ~/.bashrc, kedge completion zsh >> ~/.zshrc, or
    kedge completion fish > ~/.config/fish/completions/kedge.fish
    """
    script = build_script(shell)
    return Result({"shell": shell, "script": script}, script)


def build_script(shell: str) -> str:
    """Return the script, without click's check of the local bash version."""
    from click.shell_completion import ShellComplete, get_completion_class

    from kedge.cli import group

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.UsageError(f"completion for {shell} is not supported")
    return ShellComplete.source(completion_class(group, {}, "kedge", COMPLETE_VARIABLE))
