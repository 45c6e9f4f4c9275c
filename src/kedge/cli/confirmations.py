"""Confirmation of addresses, functions and files that stored data refers to.

A store may contain conversations that were imported or written by another person. Their data must not decide
where API keys are sent or which code runs, so a reference from a store is used only if the user has used it
on this machine before (as an option, in the configuration or in a workflow file) or confirms it. Confirmed
references are listed in a file in the user's data folder, one JSON string per line, similar to the
``known_hosts`` file of ssh.
"""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from kedge.config import data_dir, mask_url
from kedge.errors import UnconfirmedReference
from kedge.text.display import sanitize_text


def confirmations_file() -> Path:
    """Return the path of the list of confirmed references."""
    return data_dir() / "confirmed"


def model_references(*models: str) -> list[str]:
    """Return the addresses in model strings; known providers have none."""
    from kedge.providers import names_address

    named = (model for model in models if names_address(model))
    return [f"model at {model.rpartition('#')[0] or model}" for model in named]


def remember(references: Iterable[str]) -> None:
    """Add references to the list; a list that cannot be written is not an error."""
    new = set(references) - _load()
    if not new:
        return
    path = confirmations_file()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("a", encoding="utf-8") as file:
            # The first line break ends a line that was cut off.
            file.write("".join(f"\n{json.dumps(each)}" for each in sorted(new)) + "\n")


def require_confirmed(
    references: Iterable[str], source: str, advice: str, *, may_ask: bool = True
) -> None:
    """Check that every reference is confirmed; ask on a terminal.

    Args:
        references: The addresses, functions and files that stored data refers to.
        source: The conversation or workflow that refers to them.
        advice: How to confirm them without a terminal.
        may_ask: Whether the user may be asked for confirmation; not while serving.

    Raises:
        UnconfirmedReference: If one of them is not confirmed.
    """
    missing = sorted(set(references) - _load())
    if not missing:
        return
    shown = ", ".join(sanitize_text(mask_url(each)) for each in missing)
    message = f"{sanitize_text(source)} names what was not used on this machine before: {shown}"
    if may_ask and sys.stdin.isatty() and click.confirm(f"{message}\nUse it?", err=True):
        remember(missing)
        return
    raise UnconfirmedReference(f"{message}; {advice}")


def _load() -> set[str]:
    """Return the list; a line that is damaged, such as by a full disk, does not affect the others."""
    found: set[str] = set()
    with suppress(OSError):
        for line in confirmations_file().read_bytes().split(b"\n"):
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, str):
                    found.add(value)
    return found
