"""How other servers refuse to chain, as data: the shapes that a client meets in the wild.

Each is a status and a body; ``{id}`` stands for the response that was asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.errors import PREVIOUS_RESPONSE_NOT_FOUND, ZERO_DATA_RETENTION


@dataclass(frozen=True, slots=True)
class ChainRejection:
    """An answer that refuses; ``body`` is a template over the id that was asked for."""

    status: int
    body: dict[str, Any]

    def render(self, id: str) -> dict[str, Any]:
        """Write the body for this id."""
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
    # Made up: a wording that nobody has seen, so that only the code can be understood.
    "code": ChainRejection(
        400,
        _error_body(
            "We have no recollection of that.", param=None, code="previous_response_not_found"
        ),
    ),
}
"""An unknown previous response, by the server that would say so."""

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
"""A previous response of any kind, by the server that takes none."""
