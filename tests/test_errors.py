"""Tests of the error classes."""

import pickle
from typing import Any

from for_each import for_each
from kedge import errors
from kedge.errors import EngineError, KedgeError

ERROR_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Blocked": ("secrets", "the answer"),
    "HeadConflict": ("conv_1", 7, 8),
    "InvalidArguments": ("get_weather", ["city: missing"]),
    "InvalidJSON": ("$.blocks[0]", "missing"),
    "InvalidScript": ("script.toml", "is wrong"),
    "InvalidTool": ("f", "no types"),
    "OutputInvalid": ("no", ["the answer is not valid JSON"]),
    "SchemaTooComplex": ("takes more than 10 steps",),
    "StreamTooLarge": ("line", 10),
    "UnknownSetting": ("tols", ["tools"], "a conversation"),
    "UnknownTool": ("get_wether", ["get_weather"]),
    "UnsupportedParameter": ("n", "leave it out"),
    "Unsendable": (["call_1 has no result"],),
    "WorkflowFailed": ("wf_1", "the judge is silent"),
}
ALL_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


@for_each("error", ALL_ERRORS)
def test_every_error_is_a_kedge_error_and_can_be_pickled(error: Any) -> None:
    """A pickled error has the same message, arguments and attributes."""
    original = error(*ERROR_ARGUMENTS.get(error.__name__, ("something happened",)))
    original.add_note("a note")
    unpickled = pickle.loads(pickle.dumps(original))  # noqa: S301 - our own bytes
    assert isinstance(unpickled, KedgeError)
    assert type(unpickled) is error
    assert (str(unpickled), unpickled.args) == (str(original), original.args)
    assert vars(unpickled) == vars(original)


def test_a_pickled_engine_error_has_its_attributes() -> None:
    """Status, code and request id are preserved by pickling and are in the message."""
    details: Any = {"provider": "x", "status": 404, "code": "c", "request_id": "r"}
    original = EngineError("gone", **details, retryable=True)
    unpickled = pickle.loads(pickle.dumps(original))  # noqa: S301 - our own bytes
    assert str(unpickled) == "x, HTTP 404, c: gone (request r)"
    assert (unpickled.status, unpickled.retryable, unpickled.turn) == (404, True, None)


def test_the_tree_of_errors_is_complete() -> None:
    """The docstring of the module shows every error."""
    diagram = str(errors.__doc__).split("\n\n")[1]
    names = {line.replace("│", "").split("── ")[-1].split()[0] for line in diagram.splitlines()}
    assert names == {error.__name__ for error in ALL_ERRORS}
