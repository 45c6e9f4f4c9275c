"""Recorded exchanges with hosted APIs: JSONL files with one request and its response in each line.

Each line is an object with ``name``, ``api`` (``responses``, ``chat`` or ``messages``), ``host``, ``path`` (the method
and the path, may be missing), ``status``, ``content_type`` (may be missing), ``request`` (the parsed body, or null if
it was not recorded) and ``body`` (the text of the response). Exchanges with the same name before ``#`` belong together,
in the order of the numbers after it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]

APIS = ("responses", "chat", "messages")
PATHS = {"responses": "/responses", "chat": "/chat/completions", "messages": "/messages"}
"""The path of each API after ``/v1``."""
COMPACT_PATH = "/responses/compact"
LAST_EVENTS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "message_stop"}
)
"""The types of the events that end an answer."""
SWITCHING_PROTOCOLS = 101
"""The status of an exchange whose body has the frames of a WebSocket."""
_ID_IN_PATH = re.compile(r"/[a-z]+_\w+")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One recorded request and its response."""

    name: str
    api: str
    host: str
    status: int
    content_type: str
    request: JsonObject
    """The parsed body of the request; empty if it was not recorded."""
    body: str
    path: str = ""
    """The method and the path; empty for a request that creates an answer."""

    @property
    def group(self) -> str:
        """The name that the exchanges of one conversation have in common."""
        return self.name.partition("#")[0]

    @property
    def unread_kind(self) -> str:
        """What an exchange is that is not replayed; empty for one that is."""
        if self.api not in APIS:
            return f"API {self.api}"
        if self.status == SWITCHING_PROTOCOLS:
            return f"API {self.api}, frames of a WebSocket"
        method, _, path = self.path.partition("?")[0].partition(" ")
        if not path or (
            method.upper() == "POST" and path.endswith((PATHS[self.api], COMPACT_PATH))
        ):
            return ""
        return f"API {self.api}, {method.upper()} {_ID_IN_PATH.sub('/ID', path)}"

    @property
    def is_compaction(self) -> bool:
        """Whether the request compacts a context, and does not create an answer."""
        if self.path:
            return self.path.partition("?")[0].endswith(COMPACT_PATH)
        return not self.is_stream and self.parse().get("object") == "response.compaction"

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
        """Yield the JSON objects of a stream up to the end of its first answer, where a client stops reading."""
        for event in self._iter_all_events():
            yield event
            if event.get("type") in LAST_EVENTS:
                return

    @property
    def has_several_answers(self) -> bool:
        """Whether the streams of several answers were recorded as one."""
        if not self.is_stream:
            return False
        answers = [event for event in self._iter_all_events() if event.get("type") in LAST_EVENTS]
        return len(answers) > 1

    @property
    def sequence_gaps(self) -> list[int]:
        """The sequence numbers before which events of a stream were not recorded."""
        if not self.is_stream:
            return []
        numbers = [
            event["sequence_number"] for event in self.iter_events() if "sequence_number" in event
        ]
        return [after for before, after in pairwise(numbers) if after > before + 1]

    def _iter_all_events(self) -> Iterator[JsonObject]:
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
    request = line.get("request")
    return Exchange(
        line.get("name") or place,
        line.get("api") or "unknown",
        line.get("host") or "unknown",
        int(line.get("status") or 200),
        line.get("content_type") or "",
        request if isinstance(request, dict) else {},
        line.get("body") or "",
        line.get("path") or "",
    )


def group_exchanges(exchanges: list[Exchange]) -> list[list[Exchange]]:
    """Return the exchanges of each conversation with one API and host, in their order."""
    groups: dict[tuple[str, str, str], list[Exchange]] = {}
    for each in exchanges:
        groups.setdefault((each.group, each.api, each.host), []).append(each)
    return list(groups.values())
