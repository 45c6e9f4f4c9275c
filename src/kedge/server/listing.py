"""The endpoints of ``/v1/models``, in the shape of the API that is asked."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors
from kedge.server.http import answer_json, service_of
from kedge.server.models import Model
from kedge.server.refusing import is_anthropic


async def list_models(request: Request) -> Response:
    """Answer ``GET /v1/models``."""
    models = service_of(request).models
    shown = [_shown(request, name, model) for name, model in models.items()]
    if not is_anthropic(request.scope):
        return answer_json({"object": "list", "data": shown})
    names = list(models)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return answer_json({"data": shown, **page})


async def retrieve_model(request: Request) -> Response:
    """Answer ``GET /v1/models/{id}``."""
    name: str = request.path_params["id"]
    model = service_of(request).models.get(name)
    if model is None:
        raise errors.MODEL_UNKNOWN(model=name)
    return answer_json(_shown(request, name, model))


def _shown(request: Request, name: str, model: Model) -> dict[str, Any]:
    if not is_anthropic(request.scope):
        return {"id": name, "object": "model", "created": 0, "owned_by": "kedge"}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.window,
    }
