"""Docstrings, read for the model: what a function does, and what each parameter means.

Google, NumPy and Sphinx style are understood, also mixed. Whatever is not about parameters, results
or exceptions is the description. Exceptions are left out: a model cannot catch them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Literal

Topic = Literal["parameters", "returns", "left out", "text"]
Style = Literal["google", "numpy"]

SECTION_TOPICS: dict[str, Topic] = {
    "args": "parameters",
    "arguments": "parameters",
    "parameters": "parameters",
    "params": "parameters",
    "other parameters": "parameters",
    "keyword args": "parameters",
    "keyword arguments": "parameters",
    "returns": "returns",
    "return": "returns",
    "raises": "left out",
    "exceptions": "left out",
    "warns": "left out",
    "todo": "left out",
}
SPHINX_TOPICS: dict[str, Topic] = {
    "param": "parameters",
    "parameter": "parameters",
    "arg": "parameters",
    "argument": "parameters",
    "key": "parameters",
    "keyword": "parameters",
    "return": "returns",
    "returns": "returns",
    "raise": "left out",
    "raises": "left out",
    "rtype": "left out",
    "type": "left out",
}
UNDERLINE = re.compile(r"-{3,}\s*$")
ENTRY_PATTERNS: dict[Style, re.Pattern[str]] = {
    "google": re.compile(r"(\*{0,2}\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$"),
    "numpy": re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?()$"),
}
SPHINX_FIELD = re.compile(r":(\w+)(?:\s+([^:]+?))?\s*:\s*(.*)$")


@dataclass(slots=True)
class Docstring:
    """What a docstring says: about the function as a whole, and about its parameters."""

    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict[str, str])


def parse_docstring(text: str | None) -> Docstring:
    """Read a docstring in any of the three styles."""
    if not text:
        return Docstring()
    found = Docstring()
    prose: list[str] = []
    returns = ""
    for topic, style, lines in _split_sections(cleandoc(text).splitlines()):
        match topic:
            case "text":
                prose += lines
            case "returns":
                returns = _join_lines(lines)
            case "parameters":
                found.parameters |= dict(_parse_entries(lines, style))
            case "left out":
                pass
    found.description = _join_paragraphs(prose)
    if returns:
        found.description = f"{found.description}\n\nReturns: {returns}".strip()
    return found


def _split_sections(lines: list[str]) -> Iterator[tuple[Topic, Style, list[str]]]:
    """Cut the docstring into runs of lines with one topic each."""
    at = 0
    while at < len(lines):
        line, rest = lines[at], lines[at + 1 :]
        topic = SECTION_TOPICS.get(line.strip().removesuffix(":").lower())
        if topic and rest and UNDERLINE.match(rest[0]):
            body = _take_until_header(rest[1:])
            yield topic, "numpy", body
            at += 2 + len(body)
        elif topic and line.endswith(":") and (body := _take_indented(rest)):
            yield topic, "google", body
            at += 1 + len(body)
        elif (sphinx := SPHINX_FIELD.match(line)) and (topic := SPHINX_TOPICS.get(sphinx[1])):
            body = _take_indented(rest)
            yield topic, "google", _format_sphinx_entry(topic, sphinx, body)
            at += 1 + len(body)
        else:
            yield "text", "google", [line]
            at += 1


def _take_indented(lines: Sequence[str]) -> list[str]:
    """The lines up to the next one that starts at the margin."""
    margin = (i for i, line in enumerate(lines) if line.strip() and not line[0].isspace())
    return list(lines[: next(margin, len(lines))])


def _take_until_header(lines: Sequence[str]) -> list[str]:
    """The lines up to the next NumPy header."""
    headers = (i for i in range(len(lines) - 1) if UNDERLINE.match(lines[i + 1]))
    return list(lines[: next(headers, len(lines))])


def _format_sphinx_entry(topic: Topic, sphinx: re.Match[str], body: list[str]) -> list[str]:
    text = " ".join([sphinx[3], *(line.strip() for line in body)])
    name = sphinx[2].split()[-1] if sphinx[2] else ""
    return [f"{name}: {text}"] if topic == "parameters" else [text]


def _parse_entries(lines: list[str], style: Style) -> Iterator[tuple[str, str]]:
    """The parameters of a section, each with its text; ``x, y : int`` gives both the same."""
    margin = min((_indent_width(line) for line in lines if line.strip()), default=0)
    names: list[str] = []
    texts: list[str] = []
    for line in lines:
        start = (
            ENTRY_PATTERNS[style].match(line, margin) if line[margin : margin + 1].strip() else None
        )
        if start:
            yield from ((name, _join_lines(texts)) for name in names)
            names, texts = _split_names(start[1]), [start[2]]
        else:
            texts.append(line)
    yield from ((name, _join_lines(texts)) for name in names)


def _split_names(listed: str) -> list[str]:
    return [name.strip(" *") for name in listed.split(",")]


def _indent_width(line: str) -> int:
    return len(line) - len(line.lstrip())


def _join_lines(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def _join_paragraphs(lines: list[str]) -> str:
    """The prose, with the empty lines that removed sections left behind closed up."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip()
