"""The files of a batch: conversations in, results out.

A line of the input is one conversation, as JSON:

{"id": "a", "prompt": "Hello"}
{"id": "b", "prompts": ["My ship is the Argo.", "What is my ship?"], "system": "Be brief."}
{"id": "c", "prompt": "…", "model": "openai:gpt-5.1", "params": {"temperature": 0}}
{"id": "d", "prompt": "…", "schema": {"type": "object", "properties": …}}

The results file is append-only, with one line for each finished conversation, which is written in one call and
synced. A crash can truncate the last one; the next run removes the partial line if the file is a results file, and
rejects any other file unchanged. Failed lines are stored with their error and run again by the next run: of two
results for one id the later one is used.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

import msgspec

from kedge._internal.argument_types import check_fields, checked
from kedge._internal.arguments import check_type
from kedge._internal.files import ensure_private_file
from kedge._internal.json_text import escape_surrogates
from kedge.engines import to_output_schema
from kedge.errors import InvalidBatch, InvalidJSON, InvalidSetting
from kedge.store import RequestRecord
from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze_map, thaw

LINE_KEYS = ("id", "prompt", "prompts", "system", "model", "params", "schema")
RESERVED_OPTIONS = ("self", "key", "at", "keep", "tap", "candidates", "before_send", "output")
"""Arguments of ``Conversation.send`` and its variants that a batch sets itself or that JSON cannot express."""
_OPTION_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((str, type(None)), "a text"),
    "tools": ((list, dict), "a list of tool definitions"),
    "ephemeral": ((str, list), "a text or a list of texts"),
    "text": ((dict, type(None)), "an object"),
}
"""Options that Kedge reads itself, so no server checks their types: the types, and their name in errors."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One conversation of a batch: its prompts, model and parameters."""

    id: str
    prompts: tuple[str, ...]
    system: str = ""
    model: str = ""
    """A model string, if it differs from the batch's."""
    params: Mapping[str, Any] = EMPTY
    schema: Mapping[str, Any] | None = None
    """The JSON schema of each answer, if it has one."""

    def __post_init__(self) -> None:
        # A frozen instance is changed by object.__setattr__ only.
        check_type("id of a line", str, self.id)
        location = f"line {self.id!r}"
        check_type(f"{location}: system and model", str, self.system, self.model)
        object.__setattr__(self, "prompts", _check_prompts(self.prompts, location))
        object.__setattr__(self, "params", FrozenMap(self.params))
        if self.schema is not None:
            object.__setattr__(self, "schema", FrozenMap(self.schema))

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON values."""
        line = {name: thaw(getattr(self, name)) for name in self.__slots__}
        return {name: value for name, value in line.items() if value is not None}

    @classmethod
    def from_dict(cls, data: object, location: str = "line", *, number: int = 0) -> "BatchLine":
        """Create a line from parsed JSON.

        Args:
            data: The parsed JSON.
            location: The prefix of error messages.
            number: The line number, which is the id of a line without one.

        Raises:
            InvalidBatch: The line is malformed.
        """
        if not isinstance(data, dict):
            raise InvalidBatch(f"{location} must be a JSON object with a prompt")
        table = cast("dict[str, Any]", data)
        for key in table:
            if key not in LINE_KEYS:
                raise InvalidBatch(
                    f"{location} has the unknown member {key!r}; it may have {', '.join(LINE_KEYS)}"
                )
        if ("prompt" in table) == ("prompts" in table):
            raise InvalidBatch(f"{location} needs either a prompt or prompts")
        if "prompts" in table:
            prompts = table["prompts"]
        else:
            prompts = [table["prompt"]]
        params: object = table.get("params")
        if params is None:
            params = {}
        return cls(
            id=_check_id(table.get("id", number or None), location),
            prompts=_check_prompts(prompts, location),
            system=_check_text(table.get("system"), f"{location}: system"),
            model=_check_text(table.get("model"), f"{location}: model"),
            params=check_line_params(params, f"{location}: params"),
            schema=_check_schema(table.get("schema"), f"{location}: schema"),
        )


def check_line_params(params: object, location: str) -> dict[str, Any]:
    """Check the request parameters; those in ``RESERVED_OPTIONS`` are rejected."""
    if not isinstance(params, dict):
        raise InvalidBatch(f"{location} must be an object")
    table = cast("dict[str, Any]", params)
    for name in RESERVED_OPTIONS:
        if name in table:
            raise InvalidBatch(
                f"{location} has {name!r}, which is not a request parameter; remove it"
            )
    for name, (types, expected) in _OPTION_TYPES.items():
        if name in table and not isinstance(table[name], types):
            raise InvalidBatch(f"{location}.{name} must be {expected}")
    try:
        freeze_map(table, location)
    except InvalidJSON as error:
        raise InvalidBatch(str(error)) from error
    return table


def _check_schema(schema: object, location: str) -> dict[str, Any] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise InvalidBatch(f"{location} must be an object: a JSON schema")
    table = cast("dict[str, Any]", schema)
    try:
        to_output_schema(table, "answer")
    except (InvalidSetting, InvalidJSON) as error:
        raise InvalidBatch(f"{location}: {error}") from error
    return table


@checked
def read_lines(path: str | Path) -> list[BatchLine]:
    """Read the lines of a batch file.

    Args:
        path: A JSONL file.

    Returns:
        The lines, in order.

    Raises:
        InvalidBatch: The file cannot be read, or a line is malformed; the message has its number.
    """
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, data in _iter_objects(Path(path)):
        location = f"line {number} of {Path(path).name}"
        line = BatchLine.from_dict(data, location, number=number)
        if line.id in seen:
            raise InvalidBatch(
                f"{location} has the same id {line.id!r} as line {seen[line.id]}; ids must be unique"
            )
        seen[line.id] = number
        lines.append(line)
    return lines


def _iter_objects(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, json.loads(text)
    except OSError as error:
        raise InvalidBatch(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidBatch(f"{path} is not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidBatch(f"line {number} of {path.name} is not valid JSON: {error}") from error


def _check_prompts(value: object, location: str) -> tuple[str, ...]:
    problem = f"{location}: prompts must be a list of one or more texts that are not empty"
    if not isinstance(value, list | tuple) or not value:
        raise InvalidBatch(problem)
    texts = cast("Sequence[object]", value)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidBatch(problem)
    return tuple(cast("Sequence[str]", texts))


def _check_id(value: object, location: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidBatch(f"{location}: id must be a text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidBatch(f"{location}: id contains a lone surrogate, which UTF-8 cannot encode")
    return value


def _check_text(value: object, location: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidBatch(f"{location} must be a text")
    return value


LINE_PREFIX = b'{"id": "'
"""The start of every line of the results file."""


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
    error_class: str = ""
    """The name of the error's class, or the status of a DBOS workflow that ended without an error."""
    retryable: bool = False
    fingerprint: str = ""
    """A hash of the line's prompts, model and parameters; see ``BatchJob.fingerprint``."""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the members of a line of the results file, without empty texts, None and False."""
        members = msgspec.to_builtins(self)
        # The number 0 is a count and remains, so False cannot be found by comparison, to which it is equal.
        return {
            name: value
            for name, value in members.items()
            if value not in ("", None) and value is not False
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """The lines of a batch, and the totals of those that this run finished."""

    total: int = 0
    """The number of lines of the batch."""
    completed: int = 0
    failed: int = 0
    skipped: int = 0
    """The number of lines that earlier runs completed."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    unpriced: int = 0
    """The number of lines with answers whose cost is unknown; ``cost`` does not include them."""
    seconds: float = 0.0
    errors: Mapping[str, int] = EMPTY
    """The number of failed lines by the name of the error's class."""


class ResultsFile:
    """The results file, opened for appending."""

    @checked
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            # A device or a pipe cannot be read back, truncated and synced; /dev/full is endless.
            if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
                raise InvalidBatch(f"{self.path} is not a regular file; choose another with --out")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            ensure_private_file(self.path)
            _, complete_bytes = (
                self._read()
            )  # rejects a file of another program before it is changed
            self._file = self.path.open("ab+")
            self._file.truncate(complete_bytes)

            # The last line may be a complete result whose line break is missing.
            self._file.seek(max(complete_bytes - 1, 0))
            last_byte = self._file.read()
            if last_byte not in (b"", b"\n"):
                self._file.write(b"\n")
        except OSError as error:
            raise InvalidBatch(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            with suppress(OSError):  # ``append`` has already reported a failed write
                self._file.close()

    def load(self) -> dict[str, LineResult]:
        """Return the stored results by id; the last one of an id is used."""
        results, _ = self._read()
        return results

    def _read(self) -> tuple[dict[str, LineResult], int]:
        """Return the stored results by id, and the size of the file without a truncated last line."""
        results: dict[str, LineResult] = {}
        complete_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    result = msgspec.convert(json.loads(line), LineResult)
                except (ValueError, RecursionError) as error:
                    is_json = isinstance(error, msgspec.ValidationError)
                    if not is_json and _is_truncated(line):
                        break
                    raise InvalidBatch(
                        f"line {number} of {self.path} is not a result of a batch; "
                        "choose another file with --out"
                    ) from error
                results[result.id] = result
                complete_bytes += len(line)
        return results, complete_bytes

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


def _is_truncated(line: bytes) -> bool:
    """Return whether a line that is not JSON is a truncated result, or the zeros left by a power failure."""
    if line.endswith(b"\n"):
        return False
    if not line.strip(b"\0"):
        return True
    # It may have been truncated within the prefix.
    return line.startswith(LINE_PREFIX) or LINE_PREFIX.startswith(line)


def summarize_results(
    results: Iterable[LineResult], *, total: int, skipped: int, seconds: float
) -> Summary:
    """Return the totals of a batch."""
    listed = list(results)
    failed = [result for result in listed if result.status == "failed"]
    unpriced = [result for result in listed if result.cost is None and result.answers]
    return Summary(
        total=total,
        completed=len(listed) - len(failed),
        failed=len(failed),
        skipped=skipped,
        **sum_tokens(listed),
        cost=sum(result.cost or 0.0 for result in listed),
        unpriced=len(unpriced),
        seconds=seconds,
        errors=FrozenMap(Counter(result.error_class for result in failed if result.error_class)),
    )


def sum_tokens(counted: Iterable[LineResult | RequestRecord]) -> dict[str, Any]:
    """Return the sums of the token fields, as keyword arguments of ``Summary`` and ``LineResult``."""
    listed = list(counted)
    names = ("input_tokens", "cached_tokens", "output_tokens")
    return {name: sum(getattr(each, name) or 0 for each in listed) for name in names}
