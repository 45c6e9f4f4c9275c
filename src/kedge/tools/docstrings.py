"""Docstrings of tools: a description for the model, and the meaning of each parameter.

``docstring_parser`` reads Google, NumPy and Sphinx style. Exceptions are left out of the description: a
model cannot catch them. The parser is imported when the first tool is created.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import docstring_parser

OMITTED_SECTIONS = {"param", "raises", "returns", "rtype", "todo", "type", "warns"}
_SECTION_HEADER = re.compile(r"\w[\w ]*:")


@dataclass(frozen=True, slots=True)
class Docstring:
    """The description of a function and of its parameters, by name."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def parse_docstring(text: str | None) -> Docstring:
    """Parse a docstring in any of the three styles; unknown sections become part of the description."""
    from docstring_parser import ParseError, parse

    source = cleandoc(text or "")
    try:
        parsed = parse(source)
    except (ParseError, IndexError):  # it raises IndexError for a field without a name
        return Docstring(source)
    prose = [
        parsed.description or "",
        *_iter_sections(parsed),
        _find_trailing_prose(source, parsed),
    ]
    if parsed.returns and (result := parsed.returns.description or parsed.returns.type_name):
        prose.append(f"Returns: {_join_lines(result)}")
    parameters = {
        name.strip(" *"): _join_lines(parameter.description or "")
        for parameter in parsed.params
        for name in parameter.arg_name.split(",")
    }
    return Docstring("\n\n".join(text.strip("\n") for text in prose if text), parameters)


def _iter_sections(parsed: "docstring_parser.Docstring") -> Iterator[str]:
    """Yield the other sections, such as examples, with their titles."""
    for section in parsed.meta:
        if section.args[0] not in OMITTED_SECTIONS and section.description:
            yield f"{' '.join(section.args).capitalize()}: {section.description}"


def _find_trailing_prose(source: str, parsed: "docstring_parser.Docstring") -> str:
    """Return unindented text after a Google section, which ``docstring_parser`` drops."""
    from docstring_parser import DocstringStyle

    if parsed.style is not DocstringStyle.GOOGLE or not parsed.meta:
        return ""
    description = parsed.description or ""
    _, _, after = source.removeprefix(description).partition(":\n")
    lines = [line for line in after.splitlines() if line[:1].strip() and line not in description]
    return "\n".join(line for line in lines if not _SECTION_HEADER.fullmatch(line))


def _join_lines(text: str) -> str:
    return " ".join(text.split())
