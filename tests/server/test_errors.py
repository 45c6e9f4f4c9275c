import re
from pathlib import Path

from kedge.server import errors


def test_an_error_answers_with_the_four_members_of_the_api() -> None:
    """The body of an error is the object that every client of the API knows."""
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


def test_a_clients_value_is_never_read_as_a_template() -> None:
    """Braces in a value are repeated as they came."""
    assert errors.UNKNOWN_PARAMETER(path="{path}{0}").message == "Unknown parameter: '{path}{0}'."


def test_an_error_about_a_lone_surrogate_can_itself_be_sent() -> None:
    """A broken string is spelled out, so that the answer is valid UTF-8."""
    error = errors.UNKNOWN_PARAMETER(path="\ud800")
    assert error.message.encode() == rb"Unknown parameter: '\ud800'."
    assert error.param == r"\ud800"


def test_an_error_message_truncates_long_values() -> None:
    """It never repeats a complete upload."""
    assert len(errors.PREVIOUS_RESPONSE_NOT_FOUND(id="x" * 100_000).message) < 1_100


PAGE = Path(__file__).parents[2] / "docs" / "strictness.md"


def test_the_page_lists_exactly_the_messages_of_the_local_server() -> None:
    """Those for which the hosted API has published none, row by row."""
    source = Path(errors.__file__).read_text()
    names = re.findall(
        r"^([A-Z_]+) = ErrorTemplate\(",
        source[source.index("# Messages of the local server") :],
        re.MULTILINE,
    )
    expected: list[str] = []
    for name in names:
        one: errors.ErrorTemplate = getattr(errors, name)
        param, code = (f"`{value or 'null'}`" for value in (one.param, one.code))
        expected.append(f"| {one.status} | {param} | {code} | {one.message} |")
    written = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert sorted(written) == sorted(expected)
