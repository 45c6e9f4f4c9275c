"""API operations: route, validation and documentation in one table entry.

The size of requests is limited, and they are validated before a handler is called; responses are models,
too. The OpenAPI document is generated from the same entries, so it cannot differ from the routes.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kedge import errors
from kedge._internal.large_json import LARGE_BYTES, MAX_ITEMS, count_values
from kedge._internal.responsive import compute
from kedge.server.errors import ApiError
from kedge.server.http import collect_body
from kedge.server.request_log import EscapedJSONResponse
from kedge.store import Store
from kedge.web.security import SESSION_COOKIE, is_json
from kedge.web.service import ConversationService, get_service
from kedge.web.shapes import ErrorResponse

MAX_BODY_BYTES = 2_000_000
"""The maximum size of a request body."""
MAX_BODY_VALUES = MAX_ITEMS
"""The maximum number of JSON values in a request body."""


class _NumberConvertor(IntegerConvertor):
    """A number of the store in a path. Python converts integers of limited length only."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _NumberConvertor())

_ENCODED_SLASH = "\ufdd0"
"""The character that replaces an encoded slash while a path is matched; no text contains it."""


class IdRoute(Route):
    """A route whose path may have an encoded slash (`%2F`), which is a part of an id and separates nothing."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a path with its encoded slashes marked, and return them as slashes in the parameters."""
        raw = scope.get("raw_path") or b""
        if b"%2f" in raw.lower():
            path = re.sub("%2f", quote(_ENCODED_SLASH), raw.decode("latin-1"), flags=re.IGNORECASE)
            scope = {**scope, "path": unquote(path.partition("?")[0])}
        match, child_scope = super().matches(scope)
        path_params = child_scope.get("path_params", {})
        for name, value in path_params.items():
            if isinstance(value, str):
                path_params[name] = value.replace(_ENCODED_SLASH, "/")
        return match, child_scope


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A validated call of an operation."""

    service: ConversationService
    request: Request

    @property
    def store(self) -> Store:
        """The store of the caller."""
        return self.service.store

    @property
    def id(self) -> str:
        """The id in the path."""
        return self.path["id"]

    @property
    def path(self) -> dict[str, Any]:
        """The parameters in the path."""
        return self.request.path_params


Handler = Callable[..., Awaitable[BaseModel | Response]]
"""A function with an `ApiCall`, and a validated ``query`` or ``body`` if it has such a parameter."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the API; the handler's docstring is its summary, and its annotations are its models."""

    method: str
    path: str
    handler: Handler
    status: int = 200
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    """Statuses of errors, in addition to the statuses that follow from the parameters."""
    max_bytes: int = MAX_BODY_BYTES
    is_large: bool = False
    """Whether the answer may have megabytes; it is encoded in a thread."""

    @property
    def summary(self) -> str:
        """One line about the operation."""
        return (self.handler.__doc__ or "").rstrip(".")

    @property
    def query(self) -> type[BaseModel] | None:
        """The model of the query parameters."""
        return self.handler.__annotations__.get("query")

    @property
    def body(self) -> type[BaseModel] | None:
        """The model of the request body."""
        return self.handler.__annotations__.get("body")

    @property
    def response_model(self) -> type[BaseModel] | None:
        """The model of the response, if it is JSON."""
        returned = self.handler.__annotations__["return"]
        for kind in get_args(returned) or (returned,):
            if issubclass(kind, BaseModel):
                return kind
        return None

    @property
    def route(self) -> Route:
        """The route of the operation."""
        return IdRoute(self.path, self.endpoint, methods=[self.method])

    async def endpoint(self, request: Request) -> Response:
        """Validate a request, run the handler and build the response."""
        if self.body and not is_json(request.headers):
            raise RequestError(415, "not_json", "send the body as application/json")
        inputs: dict[str, BaseModel] = {}
        if self.query:
            inputs["query"] = self.query.model_validate(dict(request.query_params))
        if self.body:
            content = await read_body(request, self.max_bytes)
            parse = partial(_parse_body, self.body, content)
            inputs["body"] = await compute(parse, is_long=len(content) > LARGE_BYTES)
        answer = await self.handler(ApiCall(get_service(request), request), **inputs)
        if isinstance(answer, Response):
            return answer
        return await compute(partial(_encode_answer, answer, self.status), is_long=self.is_large)


def _parse_body(model: type[BaseModel], content: bytes) -> BaseModel:
    """Return a valid body; the values of a body are counted before they are created."""
    if count_values(content) > MAX_BODY_VALUES:
        message = f"the request body is limited to {MAX_BODY_VALUES:,} JSON values"
        raise RequestError(413, "too_large", message)
    return model.model_validate_json(content)


def _encode_answer(answer: BaseModel, status: int) -> Response:
    return EscapedJSONResponse(answer.model_dump(mode="json"), status)


class RequestError(Exception):
    """A request that cannot be read, with its status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


REPORTED_ERRORS = (errors.KedgeError, RequestError, ValidationError)
"""Errors that are reported to the client."""


def map_error(error: Exception) -> tuple[int, str, str]:
    """Return the status, code and message of an error."""
    if isinstance(error, RequestError):
        return error.status, error.code, str(error)
    if isinstance(error, ValidationError):
        return 422, "invalid", _validation_message(error)
    message = errors.describe_for_client(error)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return status, code, message
    return 400, "refused", message


_STATUSES: tuple[tuple[type[errors.KedgeError], int, str], ...] = (
    (errors.NotInStore, 404, "not_found"),
    (errors.HeadConflict, 409, "head_conflict"),
    (errors.KeyReused, 409, "key_reused"),
    (errors.StoreError, 503, "store"),
    (errors.AnswerIncomplete, 422, "incomplete"),  # such as by the request's max_output_tokens
    (errors.EngineError, 502, "engine"),
)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the body of a request, up to a maximum size."""
    read_seconds: float = request.app.state.read_seconds
    try:
        return await collect_body(request.scope, request.receive, max_bytes, read_seconds)
    except ApiError as error:
        code, message = {
            408: ("slow", f"the request body did not arrive within {read_seconds:g} seconds"),
            413: ("too_large", f"the request body is limited to {max_bytes:,} bytes"),
            415: ("compressed", "send the body uncompressed"),
        }[error.status]
        raise RequestError(error.status, code, message) from None
    except ClientDisconnect:
        raise RequestError(400, "gone", "the request body is incomplete; send it again") from None


def _validation_message(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(map(str, first["loc"]))
    if not location:
        return first["msg"]
    return f"{location}: {first['msg']}"


def build_openapi(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of operations."""
    shapes = [op.response_model for op in operations if op.response_model] + [ErrorResponse]
    bodies = [op.body for op in operations if op.body]
    models = [(shape, "serialization") for shape in dict.fromkeys(shapes)]
    models += [(shape, "validation") for shape in dict.fromkeys(bodies)]
    template = "#/components/schemas/{model}"
    _, schemas = models_json_schema(cast("Any", models), ref_template=template)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":number}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _describe_operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kedge",
            "version": version,
            "description": "Conversations, their response trees, plans and figures of one user. Where the "
            "server requires a token, send it as a bearer; a session of the page works, too.",
        },
        "security": [{"token": []}, {"session": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": SESSION_COOKIE},
            },
        },
    }


def _describe_operation(operation: Operation) -> dict[str, Any]:
    description = {
        "summary": operation.summary,
        "operationId": operation.handler.__name__,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": _describe_responses(operation),
    }
    if operation.body:
        content = _describe_content(operation.body)
        description["requestBody"] = {"required": True, "content": content}
    return description


def _path_parameters(path: str) -> list[dict[str, Any]]:
    number = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    text = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": number if kind else text}
        for name, kind in re.findall(r"{(\w+)(:number)?}", path)
    ]


def _query_parameters(shape: type[BaseModel] | None) -> list[dict[str, Any]]:
    if shape is None:
        return []
    schema = shape.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _drop_null(member)}
        for name, member in schema["properties"].items()
    ]


def _drop_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a query parameter: an absent parameter is omitted."""
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if schema.get("default") is not None:
        rest["default"] = schema["default"]
    for alternative in schema.get("anyOf", ()):
        if alternative.get("type") != "null":
            return {**rest, **alternative}
    return rest


def _describe_responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {str(operation.status): {"description": operation.summary}}
    if operation.status != 204:
        content = _describe_content(operation.response_model, operation.media_type)
        responses[str(operation.status)]["content"] = content
    error_statuses = {401, 403, 429, *operation.errors}
    if "{" in operation.path:
        error_statuses |= {404}
    if operation.query or operation.body:
        error_statuses |= {422}
    if operation.body:
        error_statuses |= {400, 408, 413, 415}
    for status in sorted(error_statuses):
        responses[str(status)] = {
            "description": _ERROR_DESCRIPTIONS[status],
            "content": _describe_content(ErrorResponse),
        }
    return responses


def _describe_content(
    shape: type[BaseModel] | None, media_type: str = "application/json"
) -> dict[str, Any]:
    if shape is None:
        return {media_type: {"schema": {}}}
    reference = {"$ref": f"#/components/schemas/{shape.__name__}"}
    content: dict[str, Any] = {"application/json": {"schema": reference}}
    if media_type not in content:
        content[media_type] = {"schema": {}}
    return content


_ERROR_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "The token is missing or wrong.",
    403: "The request came from another web site or has another host name, or the token lacks a scope.",
    404: "The object does not exist.",
    408: "The body did not arrive in time.",
    409: "Another client moved the head first, or the key was used for another message.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "A member is missing, wrong or unknown.",
    429: "The limit of the token is reached; retry-after has the seconds to wait.",
    502: "The model's server rejected the request or failed.",
    503: "The store is not available.",
}
