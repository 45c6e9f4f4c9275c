"""Is this request well formed? One pure function per endpoint, each raising the first ApiError.

The checks run in the order of the live API: ``model`` is there, ``input`` is there, no parameter is
unknown, and then every parameter in the order of its table (``shapes.parameters``). What a
request refers to is the state's business; the checks of that phase that need no store stand at
the end of this module, for the server to call when their turn comes:

    check_create(body)          the schema
    check_exclusive(body)       conversation and previous_response_id exclude each other
    …                           the server finds the conversation
    check_prompt(body)          this server keeps no prompts, so none is ever found
    …                           the server finds the previous response
    check_not_empty(body)       something must be asked
    …                           coherence, then what the model can do
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from kedge.server import errors
from kedge.server.shapes import parameters
from kedge.server.shapes.branches import Object
from kedge.server.shapes.language import kind_of


def parse_body(raw: bytes) -> object:
    """Read a request's bytes as JSON; NaN, bad UTF-8 and bottomless nesting are none.

    Of two equal keys the last one wins, as everywhere.
    """
    try:
        return json.loads(raw.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # ValueError covers bad UTF-8, bad JSON and integers of thousands of digits.
        raise errors.NOT_JSON() from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


@dataclass(frozen=True, slots=True)
class Request:
    """The body of one endpoint: its parameters, which are required, which have moved away."""

    known: Object
    required: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict[str, str])

    def check(self, body: object) -> dict[str, Any]:
        """Check that the required are there and nothing is unknown; then each in its order."""
        if type(body) is not dict:
            raise errors.BODY_NOT_OBJECT(got=kind_of(body))
        held = cast("dict[str, Any]", body)
        for name in self.required:
            if name not in held:
                raise self._missing(name, held)
        if not held.keys() <= self.known.members.keys():
            raise self._unknown(held)
        self.known.check(held, None)
        return held

    def _missing(self, name: str, held: Mapping[str, Any]) -> errors.ApiError:
        for old, new in self.moved.items():
            if new == name and old in held:
                return errors.MOVED(path=old, to=new)
        return errors.MISSING(path=name)

    def _unknown(self, held: Mapping[str, Any]) -> errors.ApiError:
        known = self.known.members
        name = next(name for name in held if name not in known)
        if name in self.moved:
            return errors.MOVED(path=name, to=self.moved[name])
        near = nearest(name, [other for other in known if other not in held])
        if near:
            suggestion = " or ".join(f"'{other}'" for other in near)
            return errors.UNKNOWN_WITH_SUGGESTION(path=name, suggestion=suggestion)
        return errors.UNKNOWN(path=name)


_CREATE = Request(Object(parameters.CREATE), required=("model", "input"), moved=parameters.MOVED)
_MESSAGE = Request(Object(parameters.MESSAGE), required=("model", "input"), moved=parameters.MOVED)
_INPUT_TOKENS = Request(Object(parameters.INPUT_TOKENS))
_COMPACT = Request(Object(parameters.COMPACT), required=("model",))
_CONVERSATION_CREATE = Request(Object(parameters.CONVERSATION_CREATE))
_CONVERSATION_UPDATE = Request(Object(parameters.CONVERSATION_UPDATE), required=("metadata",))
_CONVERSATION_ITEMS = Request(Object(parameters.CONVERSATION_ITEMS), required=("items",))


def check_create(body: object, *, on_socket: bool = False) -> None:
    """Check a request to ``POST /v1/responses``, or the same as a message on a socket."""
    held = (_MESSAGE if on_socket else _CREATE).check(body)
    for entry in held.get("context_management") or ():
        if entry["type"] != "compaction":
            raise errors.CONTEXT_MANAGEMENT_UNSUPPORTED(type=entry["type"])


def check_input_tokens(body: object) -> None:
    """Check a request to ``POST /v1/responses/input_tokens``."""
    _INPUT_TOKENS.check(body)


def check_compact(body: object) -> None:
    """Check a request to ``POST /v1/responses/compact``."""
    _COMPACT.check(body)


def check_conversation_create(body: object) -> None:
    """Check a request to ``POST /v1/conversations``."""
    _CONVERSATION_CREATE.check(body)


def check_conversation_update(body: object) -> None:
    """Check a request to ``POST /v1/conversations/{id}``."""
    _CONVERSATION_UPDATE.check(body)


def check_conversation_items(body: object) -> None:
    """Check a request to ``POST /v1/conversations/{id}/items``."""
    _CONVERSATION_ITEMS.check(body)


def check_exclusive(body: Mapping[str, Any]) -> None:
    """Refuse a request that names both a conversation and a previous response."""
    if body.get("conversation") is not None and body.get("previous_response_id") is not None:
        raise errors.MUTUALLY_EXCLUSIVE()


def check_prompt(body: Mapping[str, Any]) -> None:
    """Refuse a request for a stored prompt: this server has none."""
    prompt = body.get("prompt")
    if prompt is not None:
        raise errors.PROMPT_NOT_FOUND(id=prompt["id"])


def check_not_empty(body: Mapping[str, Any]) -> None:
    """Refuse a request that asks nothing: no input, and nothing earlier to go on from."""
    if body.get("input"):
        return
    if body.get("previous_response_id") is None and body.get("conversation") is None:
        raise errors.NOTHING_TO_ANSWER()


MAX_DISTANCE = 2


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Find at most two known names within two edits of this one, the nearest first."""
    near = ((distance(name, other), other) for other in known)
    ranked = sorted((pair for pair in near if pair[0] <= MAX_DISTANCE), key=lambda pair: pair[0])
    return [other for _, other in ranked[:2]]


def distance(one: str, other: str) -> int:
    """Count the insertions, deletions and substitutions between two names (up to three)."""
    if abs(len(one) - len(other)) > MAX_DISTANCE:
        return MAX_DISTANCE + 1
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, start=1):
        above, row = row, [i]
        for j, right in enumerate(other, start=1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (left != right)))
    return row[-1]
