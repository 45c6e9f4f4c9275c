"""Render templates with autoescaping.

Only markup of this package is inserted without escaping. Pages are rendered in threads, so that other requests are
answered meanwhile.
"""

import hashlib
from functools import cache, partial
from importlib.resources import files
from itertools import count
from typing import Any, cast
from urllib.parse import quote

from anyio import to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kedge._internal import display
from kedge._internal.json_text import escape_surrogates
from kedge.planning import REASONS
from kedge.planning.anchors import get_conversation_id
from kedge.planning.explain import MODE_REASONS
from kedge.presentation.response_tree import MARK_DESCRIPTIONS
from kedge.web import plan_card, shapes, svg, transcript
from kedge.web.markdown import PageMarkdown
from kedge.web.security import SESSION_KEY
from kedge.web.service import build_tag_url

STATIC_DIR = files("kedge.web") / "static"
Names = dict[str, Any]


def _quote(value: object) -> str:
    """Encode a value for a URL, also a slash, which may be a part of an id."""
    return quote(str(value), safe="")


_FILTERS = {
    **{name: function for name, function in vars(display).items() if callable(function)},
    "body_text": plan_card.format_body,
    "build_tag_url": build_tag_url,
    "urlencode": _quote,
}


@cache
def get_environment() -> Environment:
    """Return the template environment with its filters and drawing functions."""
    environment = Environment(
        loader=PackageLoader("kedge.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cast("Names", environment.filters).update(_FILTERS)
    cast("Names", environment.globals).update(
        svg=svg,
        display=display,
        plan_card=plan_card,
        shapes=shapes,
        transcript=transcript,
        reasons={**REASONS, **MODE_REASONS},
        marks=MARK_DESCRIPTIONS,
        static=static_url,
        get_conversation_id=get_conversation_id,
        next_number=count(1).__next__,
    )
    return environment


@cache
def static_url(name: str) -> str:
    """Return the URL of a static file, which changes with its content, so that it can be cached."""
    _, tag = _read_static(name)
    return f"/static/{name}?v={tag.strip(chr(34))}"


def render(template: str, **values: Any) -> str:
    """Render a template, with the Markdown in it."""
    values["markdown"] = PageMarkdown().render
    return escape_surrogates(get_environment().get_template(template).render(**values))


async def render_page(
    request: Request, template: str, *, section: str, status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page in a thread, because that may take long; ``section`` is its entry in the navigation."""
    values |= {"section": section, "has_session": bool(request.scope.get(SESSION_KEY))}
    return HTMLResponse(await to_thread.run_sync(partial(render, template, **values)), status)


async def serve_static(request: Request) -> Response:
    """Serve a static file; it is cached without a check if its URL has the tag of its content."""
    name = request.path_params["name"]
    if name not in _static_names():
        raise HTTPException(404)
    body, tag = _read_static(name)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    is_immutable = request.query_params.get("v") == tag.strip('"')
    caching = "no-cache"
    if is_immutable:
        caching = "public, max-age=31536000, immutable"
    kind = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(body, media_type=kind, headers={"etag": tag, "cache-control": caching})


_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _static_names() -> frozenset[str]:
    return frozenset(file.name for file in STATIC_DIR.iterdir())


@cache
def _read_static(name: str) -> tuple[bytes, str]:
    body = (STATIC_DIR / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:12]}"'
