"""Prompt templates: ``{name}`` and ``{name.member}`` are placeholders; ``{{`` is a brace.

Only names of inputs and steps and members of plain values can be used. Missing names are reported before
anything is sent.

Hand-written because specs are stored and shared: a template engine would evaluate expressions in them.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from kedge.errors import InvalidWorkflow

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(?P<path>[A-Za-z_][\w.]*)\}|(?P<stray>[{}])")
_BRACES = {"{{": "{", "}}": "}"}


def find_names(template: str, where: str) -> set[str]:
    """Return the names that a template uses."""
    names: set[str] = set()
    for place in _PLACEHOLDER.finditer(template):
        if place["stray"]:
            raise InvalidWorkflow(
                f"{where}: the prompt has a single {place['stray']!r}; write it twice for a literal brace"
            )
        if place["path"]:
            names.add(place["path"].partition(".")[0])
    return names


def check_names(template: str, known: Collection[str], where: str) -> None:
    """Raise ``InvalidWorkflow`` if a template uses an unknown name."""
    unknown = sorted(find_names(template, where) - set(known))
    if unknown:
        there = ", ".join(sorted(known)) or "nothing yet"
        raise InvalidWorkflow(f"{where}: the prompt uses {unknown[0]!r}; there is {there}")


def fill_template(template: str, values: Mapping[str, Any], where: str) -> str:
    """Return the template with its placeholders filled in."""

    def fill(place: re.Match[str]) -> str:
        if place[0] in _BRACES:
            return _BRACES[place[0]]
        return _format_value(_lookup_value(place["path"], values, where))

    return _PLACEHOLDER.sub(fill, template)


def _lookup_value(path: str, values: Mapping[str, Any], where: str) -> Any:
    here: Any = values
    for step in path.split("."):
        match here:
            case Mapping() if step in here:
                here = cast("Mapping[str, Any]", here)[step]
            case list() if step.isdigit() and int(step) < len(cast("list[Any]", here)):
                here = cast("list[Any]", here)[int(step)]
            case _:
                raise InvalidWorkflow(f"{where}: there is no {path!r} to put into the prompt")
    return here


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
