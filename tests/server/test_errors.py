import re
from pathlib import Path

from kedge.server import errors


def test_error_body_has_four_members() -> None:
    """The body of an error has the format of the API."""
    error = errors.PREVIOUS_RESPONSE_NOT_FOUND(id="resp_x")
    assert error.status == 400
    assert error.body() == {
        "error": {
            "message": "Previous response with id 'resp_x' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }
    }


def test_values_are_not_used_as_templates() -> None:
    """Braces in a client's value are repeated unchanged in the message."""
    assert errors.UNKNOWN_PARAMETER(path="{path}{0}").message == "Unknown parameter: '{path}{0}'."


def test_lone_surrogate_is_escaped() -> None:
    """A lone surrogate is escaped in the message, so that the response is valid UTF-8."""
    error = errors.UNKNOWN_PARAMETER(path="\ud800")
    assert error.message.encode() == rb"Unknown parameter: '\ud800'."
    assert error.param == r"\ud800"


def test_an_error_message_truncates_long_values() -> None:
    """An error message does not repeat a complete upload."""
    assert len(errors.PREVIOUS_RESPONSE_NOT_FOUND(id="x" * 100_000).message) < 1_100


PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def test_the_page_lists_exactly_the_messages_of_the_local_server() -> None:
    """The page lists each message for which the hosted API has published none."""
    source = Path(errors.__file__).read_text()
    names = re.findall(
        r"^([A-Z_]+) = (?:ErrorTemplate|_path_error)\(",
        source[source.index("# Messages of the local server") :],
        re.MULTILINE,
    )
    expected: list[str] = []
    for name in names:
        one: errors.ErrorTemplate = getattr(errors, name)
        param, code = (f"`{value or 'null'}`" for value in (one.param, one.code))
        expected.append(f"| {one.status} | {param} | {code} | {one.message} |")
    documented = [
        line
        for line in PAGE.read_text().split("\n## Strictness\n")[1].splitlines()
        if re.match(r"\| \d", line)
    ]
    assert sorted(documented) == sorted(expected)
