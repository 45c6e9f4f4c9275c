"""The results file of a batch: append-only, one line for each finished conversation.

A line is written in one call and synced. A crash can truncate the last one; the next run removes the partial line
if the file is a results file, and rejects any other file unchanged. Failed lines are stored with their error and
run again by the next run: of two results for one id the later one is used.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import msgspec

from kedge.errors import InvalidBatch
from kedge.store import RequestRecord
from kedge.text.json_text import escape_surrogates
from kedge.turns.frozen_json import EMPTY, FrozenMap

LINE_PREFIX = b'{"id": "'
"""The start of every line of the file."""


class LineResult(msgspec.Struct, frozen=True):
    """The result of a line: its answers, and the error if it failed."""

    id: str
    status: Literal["completed", "failed"]
    answers: tuple[str, ...] = ()
    conversation: str = ""
    provider_response_id: str = ""
    """The provider's id of the last response."""
    model: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    seconds: float = 0.0
    error: str = ""
    kind: str = ""
    """The class name of the error."""
    retryable: bool = False
    fingerprint: str = ""
    """A hash of the line's prompts, model and parameters; see ``BatchJob.fingerprint``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a line of the file."""
        return {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if value not in ("", None) and value is not False  # unlike False, 0 is a count
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a batch. ``skipped`` lines were finished by earlier runs."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    skipped: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    unpriced: int = 0
    seconds: float = 0.0
    errors: Mapping[str, int] = EMPTY
    """Number of failed lines by error."""


class ResultsFile:
    """The results file, opened for appending."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            # A device or a pipe cannot be read back, truncated and synced; /dev/full is endless.
            if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
                raise InvalidBatch(f"{self.path} is not a regular file; choose another with --out")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            self.load()  # rejects a file of another program before it is changed
            _repair_last_line(self.path)
            self._file = self.path.open("ab")
        except OSError as error:
            raise InvalidBatch(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            with suppress(OSError):  # ``add`` has already reported a failed write
                self._file.close()

    def load(self) -> dict[str, LineResult]:
        """Return the stored results by id; the last one of an id is used."""
        found: dict[str, LineResult] = {}
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if _is_truncated(text):
                    break
                try:
                    result = msgspec.convert(json.loads(text), LineResult)
                except (ValueError, RecursionError) as error:
                    raise InvalidBatch(
                        f"line {number} of {self.path} is not a result of a batch; "
                        "choose another file with --out"
                    ) from error
                found[result.id] = result
        return found

    def append(self, result: LineResult) -> None:
        """Append a result and sync the file."""
        assert self._file is not None  # noqa: S101 - only called while the file is open
        try:
            line = escape_surrogates(json.dumps(result.to_dict(), ensure_ascii=False))
            self._file.write(line.encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InvalidBatch(
                f"{self.path} cannot be written: {error.strerror}; the answers are in the store: "
                "free some space and run the same batch again"
            ) from error


def _is_truncated(text: bytes) -> bool:
    """Return whether a line is a truncated result, or the zeros left by a power failure."""
    if text.endswith(b"\n"):
        return False
    if text.startswith(LINE_PREFIX):
        return not _is_json(text)
    return LINE_PREFIX.startswith(text) or not text.strip(b"\0")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _repair_last_line(path: Path) -> None:
    """Remove a truncated last line, or complete one of which only the line break is missing."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        file.seek(position)
        if position != end and _is_json(file.read()):
            file.write(b"\n")
        elif position != end:
            file.truncate(position)


def summarize_results(
    results: Iterable[LineResult], *, total: int, skipped: int, seconds: float
) -> Summary:
    """Return the totals of a batch."""
    listed = list(results)
    return Summary(
        total=total,
        completed=sum(each.status == "completed" for each in listed),
        failed=sum(each.status == "failed" for each in listed),
        skipped=skipped,
        **sum_tokens(listed),
        cost=sum(each.cost or 0.0 for each in listed),
        unpriced=sum(each.cost is None and bool(each.answers) for each in listed),
        seconds=seconds,
        errors=FrozenMap(Counter(each.kind for each in listed if each.kind)),
    )


def sum_tokens(counted: Iterable[LineResult | RequestRecord]) -> dict[str, Any]:
    """Return the tokens of results or of requests, as the members that both have."""
    listed = list(counted)
    names = ("input_tokens", "cached_tokens", "output_tokens")
    return {name: sum(getattr(each, name) or 0 for each in listed) for name in names}
