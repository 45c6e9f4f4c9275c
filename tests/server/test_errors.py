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
    assert errors.UNKNOWN(path="{path}{0}").message == "Unknown parameter: '{path}{0}'."


def test_an_error_about_a_lone_surrogate_can_itself_be_sent() -> None:
    """A broken string is spelled out, so that the answer is valid UTF-8."""
    error = errors.UNKNOWN(path="\ud800")
    assert error.message.encode() == rb"Unknown parameter: '\ud800'."
    assert error.param == r"\ud800"


def test_an_error_never_repeats_a_whole_upload() -> None:
    """A long value is clipped."""
    assert len(errors.PREVIOUS_RESPONSE_NOT_FOUND(id="x" * 100_000).message) < 1_100
