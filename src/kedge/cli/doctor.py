"""``kedge doctor``: whether everything is in place, with advice where it is not.

Without ``--online`` nothing leaves this machine. Keys are shown masked. The exit code is 1 if something
is wrong, and 0 if there are only notes.
"""

import os
import sys

import click

from kedge.cli.checks import Check, check_keys, check_versions, look_at_config
from kedge.cli.databases import check_databases
from kedge.cli.frame import command as kedge_command
from kedge.cli.output import dim, say, say_json

MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}


@kedge_command(
    "doctor", tolerant=True, short_help="Look whether everything is in place, with advice."
)
@click.option("--online", is_flag=True, help="Ask the providers whose keys are set, too.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), help="Seconds to wait for a provider.  [default: 10]"
)
def command(online: bool, timeout: float | None, as_json: bool) -> None:
    """Look whether everything is in place: versions, keys, databases, configuration.

    With --online, also whether the providers can be reached with the keys that are set.
    """
    config, found = look_at_config()
    checks = [*check_versions(), *found, *check_keys(os.environ), *check_databases(config)]
    if online:
        from kedge.cli.reach import check_providers

        checks += check_providers(os.environ, config["model"], timeout or config["timeout"])
    wrong = [check for check in checks if check.state == "wrong"]
    if as_json:
        say_json({"ok": not wrong, "checks": [check.report() for check in checks]})
    else:
        _show(checks)
        _sum_up(wrong, online)
    if wrong:
        sys.exit(1)


def _show(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, color = MARKS[check.state]
        say(f"{click.style(mark, fg=color)} {check.name:<{width}}  {check.found}")
        if check.advice:
            say(f"  {'':<{width}}  {dim(check.advice)}")


def _sum_up(wrong: list[Check], online: bool) -> None:
    say()
    say(f"{len(wrong)} to mend." if wrong else "Everything is in place.")
    if not online:
        say(dim("Providers were not asked; --online does."))
