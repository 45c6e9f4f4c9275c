"""The endpoints of ``/v1/models``, in the format of the API that the request uses."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server import errors
from kedge.server.error_response import is_anthropic
from kedge.server.http import get_service, respond_json
from kedge.server.models import Model


async def list_models(request: Request) -> Response:
    """Answer ``GET /v1/models``."""
    models = get_service(request).models
    data = [_serialize_model(request, name, model) for name, model in models.items()]
    if not is_anthropic(request.scope):
        return respond_json({"object": "list", "data": data})
    names = list(models)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return respond_json({"data": data, **page})


async def retrieve_model(request: Request) -> Response:
    """Answer ``GET /v1/models/{id}``."""
    name: str = request.path_params["id"]
    model = get_service(request).models.get(name)
    if model is None:
        raise errors.MODEL_NOT_ACCESSIBLE(model=name)
    return respond_json(_serialize_model(request, name, model))


def _serialize_model(request: Request, name: str, model: Model) -> dict[str, Any]:
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
