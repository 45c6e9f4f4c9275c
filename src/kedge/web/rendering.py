"""Templates: everything that is put into them is escaped, unless this package made it as markup."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kedge.web import charts, drawing, words
from kedge.web.layout import MARKS

STATIC = files("kedge.web") / "static"
Names = dict[str, Any]

_FILTERS = {
    "ago": words.ago,
    "duration": words.duration,
    "moment": words.moment,
    "money": words.money,
    "number": words.number,
    "plural": words.plural,
    "short_id": words.short_id,
    "size": words.size,
    "stamp": words.stamp,
}


@cache
def environment() -> Environment:
    """The templates, with the words and drawings that they use."""
    made = Environment(
        loader=PackageLoader("kedge.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters, names = cast("Names", made.filters), cast("Names", made.globals)
    filters.update(_FILTERS)
    names.update(
        draw_lanes=drawing.draw_lanes,
        draw_mark=drawing.draw_mark,
        marks=MARKS,
        share_bar=charts.share_bar,
        static=static_url,
    )
    return made


@cache
def static_url(name: str) -> str:
    """The address of one of our own files; it changes with the file, so that it may be kept."""
    _, tag = _static_content(name)
    return f"/static/{name}?v={tag.strip(chr(34))}"


def render(template: str, **values: Any) -> str:
    """A template filled in."""
    return environment().get_template(template).render(**values)


def page(template: str, *, here: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A whole page; ``here`` is its place in the navigation."""
    return HTMLResponse(render(template, here=here, **values), status)


def static_file(request: Request) -> Response:
    """One of our own files: for good if its address names its content, else checked again each time."""
    name = request.path_params["name"]
    if name not in _static_names():
        raise HTTPException(404)
    body, tag = _static_content(name)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    forever = request.query_params.get("v") == tag.strip('"')
    caching = "public, max-age=31536000, immutable" if forever else "no-cache"
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(body, media_type=kind, headers={"etag": tag, "cache-control": caching})


_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _static_names() -> frozenset[str]:
    return frozenset(each.name for each in STATIC.iterdir())


@cache
def _static_content(name: str) -> tuple[bytes, str]:
    body = (STATIC / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:12]}"'
