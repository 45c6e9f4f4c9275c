"""How other servers reject ``previous_response_id``, as data.

Each rejection is a status and a body; ``{id}`` is the id of the requested response.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.errors import PREVIOUS_RESPONSE_NOT_FOUND, ZERO_DATA_RETENTION


@dataclass(frozen=True, slots=True)
class ChainRejection:
    """A rejection; ``body`` is a template with the requested id."""

    status: int
    body: dict[str, Any]

    def render(self, id: str) -> dict[str, Any]:
        """Return the body for this id."""
        return _render_template(self.body, id)


def _render_template(value: Any, id: str) -> Any:
    match value:
        case str():
            return value.replace("{id}", id)
        case dict():
            members = cast("dict[str, Any]", value)
            return {key: _render_template(one, id) for key, one in members.items()}
        case _:
            return value


def _error_body(message: str, *, param: str | None, code: str | int | None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


NOT_FOUND: Mapping[str, ChainRejection] = {
    "openai": ChainRejection(400, PREVIOUS_RESPONSE_NOT_FOUND(id="{id}").body()),
    "vllm": ChainRejection(
        404, _error_body("Response with id '{id}' not found.", param="response_id", code=404)
    ),
    "ogx": ChainRejection(404, {"detail": "Response '{id}' not found."}),
    "smg": ChainRejection(
        400,
        _error_body(
            "Previous response with id '{id}' not found.",
            param=None,
            code="previous_response_not_found",
        ),
    ),
    "xai": ChainRejection(
        404,
        {"code": "not-found", "error": ZERO_DATA_RETENTION().message},
    ),
    # No real server uses this message, so only the code can be recognized.
    "code": ChainRejection(
        400,
        _error_body(
            "We have no recollection of that.", param=None, code="previous_response_not_found"
        ),
    ),
}
"""The rejection of an unknown previous response, by server."""

UNSUPPORTED: Mapping[str, ChainRejection] = {
    "llama.cpp": ChainRejection(
        400,
        {
            "error": {
                "code": 400,
                "message": "llama.cpp does not support 'previous_response_id'.",
                "type": "invalid_request_error",
            }
        },
    ),
    "zdr": ChainRejection(ZERO_DATA_RETENTION().status, ZERO_DATA_RETENTION().body()),
}
"""The rejection of any previous response, by servers that support none."""
