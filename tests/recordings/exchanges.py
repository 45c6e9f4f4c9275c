"""Recorded exchanges with hosted APIs: JSONL files with one request and its response in each line.

Each line is an object with ``name``, ``api`` (``responses``, ``chat`` or ``messages``), ``host``, ``status``,
``content_type`` (may be missing), ``request`` (the parsed body) and ``body`` (the text of the response). Exchanges
with the same name before ``#`` belong together, in the order of the numbers after it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

APIS = ("responses", "chat", "messages")
PATHS = {"responses": "/responses", "chat": "/chat/completions", "messages": "/messages"}
"""The path of each API after ``/v1``."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One recorded request and its response."""

    name: str
    api: str
    host: str
    status: int
    content_type: str
    request: JsonObject
    body: str

    @property
    def group(self) -> str:
        """The name that the exchanges of one conversation have in common."""
        return self.name.partition("#")[0]

    @property
    def is_stream(self) -> bool:
        """Whether the response is a stream of events, which some recordings do not say in its type."""
        return self.body.lstrip("\ufeff\r\n ").startswith(("event:", "data:", ":"))

    @property
    def media_type(self) -> str:
        """The content type of the response."""
        return "text/event-stream" if self.is_stream else self.content_type or "application/json"

    @property
    def is_answer(self) -> bool:
        """Whether the response is an answer of the API, and neither an error nor something else."""
        if not 200 <= self.status < 300:
            return False
        return self.is_stream or bool(ANSWER_MEMBERS[self.api] & self.parse().keys())

    def parse(self) -> JsonObject:
        """Return the body of a response that is not a stream; empty if it is not an object."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def iter_events(self) -> Iterator[JsonObject]:
        """Yield the JSON objects of a stream."""
        for message in self.body.replace("\r\n", "\n").split("\n\n"):
            lines = [line for line in message.split("\n") if line.startswith("data:")]
            data = "\n".join(line.removeprefix("data:").strip() for line in lines)
            if data.startswith("{"):
                yield json.loads(data)


ANSWER_MEMBERS: dict[str, set[str]] = {
    "responses": {"output", "status"},
    "chat": {"choices"},
    "messages": {"content"},
}


def read_folder(folder: Path) -> list[Exchange]:
    """Return the exchanges of all files in a folder."""
    return [each for path in sorted(folder.glob("*.jsonl")) for each in read_file(path)]


def read_file(path: Path) -> list[Exchange]:
    """Return the exchanges of one file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [
        _read_line(json.loads(line), f"{path.name}:{at}")
        for at, line in enumerate(lines, 1)
        if line
    ]


def _read_line(line: JsonObject, place: str) -> Exchange:
    if line.get("api") not in APIS:
        raise SystemExit(f"{place}: api must be one of {', '.join(APIS)}, not {line.get('api')!r}")
    request = line.get("request")
    return Exchange(
        line.get("name") or place,
        line["api"],
        line.get("host") or "unknown",
        int(line.get("status") or 200),
        line.get("content_type") or "",
        request if isinstance(request, dict) else {},
        line.get("body") or "",
    )


def group_exchanges(exchanges: list[Exchange]) -> list[list[Exchange]]:
    """Return the exchanges of each conversation with one API and host, in their order."""
    groups: dict[tuple[str, str, str], list[Exchange]] = {}
    for each in exchanges:
        groups.setdefault((each.group, each.api, each.host), []).append(each)
    return list(groups.values())
