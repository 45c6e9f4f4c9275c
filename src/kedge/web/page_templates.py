"""Render templates with autoescaping, and the Markdown from a model in them as safe HTML.

Only markup of this package is inserted without escaping. The text of a model is untrusted. Raw HTML is shown as text;
only links to web and mail addresses are allowed, and they send no referrer; remote images are not loaded, but named and
linked. The Content-Security-Policy is an additional protection.

A parser cannot be interrupted, so its input is limited: a text whose syntax takes too much work is shown as plain
text, and so are those beyond the budget of a page. Rendered texts are cached by their content. Pages are rendered in
threads, so that other requests are answered meanwhile.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache, lru_cache, partial
from html import escape
from importlib.resources import files
from itertools import count
from threading import Lock
from typing import Any, cast
from urllib.parse import quote

from anyio import to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kedge._internal import display
from kedge._internal.display import MAX_MARKDOWN_WORK, estimate_markdown_work
from kedge._internal.json_text import escape_surrogates
from kedge._internal.urls import is_safe_link
from kedge.planning import REASONS
from kedge.planning.anchors import get_conversation_id
from kedge.planning.explain import MODE_REASONS
from kedge.presentation.response_tree import MARK_DESCRIPTIONS
from kedge.web import plan_card, shapes, svg, transcript
from kedge.web.security import SESSION_KEY
from kedge.web.service import build_tag_url

STATIC_DIR = files("kedge.web") / "static"
Names = dict[str, Any]
Tokens = Sequence[Token]
Env = MutableMapping[str, Any]


def _quote(value: object) -> str:
    """Encode a value for a URL, also a slash, which may be a part of an id."""
    return quote(str(value), safe="")


_FILTERS = {
    **{name: each for name, each in vars(display).items() if callable(each)},
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
    filters, names = cast("Names", environment.filters), cast("Names", environment.globals)
    filters.update(_FILTERS)
    names.update(
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
    request: Request, template: str, *, here: str, status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page in a thread, because that may take long; ``here`` is its entry in the navigation."""
    values |= {"here": here, "has_session": bool(request.scope.get(SESSION_KEY))}
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
    caching = "public, max-age=31536000, immutable" if is_immutable else "no-cache"
    kind = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Response(body, media_type=kind, headers={"etag": tag, "cache-control": caching})


_MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@cache
def _static_names() -> frozenset[str]:
    return frozenset(each.name for each in STATIC_DIR.iterdir())


@cache
def _read_static(name: str) -> tuple[bytes, str]:
    body = (STATIC_DIR / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:12]}"'


MAX_LENGTH = 100_000
"""Longer texts are shown as plain text."""
MAX_PAGE_WORK = 1_000_000
"""The work for all texts of a page; those beyond it are shown as plain text."""
MAX_NESTING = 20
"""Texts with deeper nested blocks are shown as plain text."""
MAX_CACHED_CHARS = 8_000_000
"""The size of all cached texts and of their HTML."""

_PLAIN = Markup(
    "<p class='note'>Shown as plain text, because its formatting is too long or too complex.</p>"
    "<pre class='plain'>{}</pre>"
)
_REL = "noopener noreferrer nofollow ugc"


class PageMarkdown:
    """The Markdown of one page, rendered within the budget of a page."""

    def __init__(self) -> None:
        self._work = MAX_PAGE_WORK

    def render(self, text: str) -> Markup:
        """Convert a text to safe HTML."""
        work = estimate_markdown_work(text)
        if len(text) > MAX_LENGTH or work > min(MAX_MARKDOWN_WORK, self._work):
            return _PLAIN.format(text)
        self._work -= work
        return _cache.get(text)


class _HtmlCache:
    """The HTML of the texts that were rendered last."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Markup] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, text: str) -> Markup:
        """Return the HTML of a text, rendered unless it is cached."""
        with self._lock:
            html = self._entries.get(text)
        if html is None:
            html = _render(text)
        with self._lock:
            if text not in self._entries:
                self._size += len(text) + len(html)
            self._entries[text] = html
            self._entries.move_to_end(text)
            while self._size > MAX_CACHED_CHARS:
                self._size -= sum(map(len, self._entries.popitem(last=False)))
        return html


_cache = _HtmlCache()


def _render(text: str) -> Markup:
    parser = _get_parser()
    env: dict[str, Any] = {}
    tokens = parser.parse(text, env)
    if any(token.nesting == 1 and token.level >= MAX_NESTING - 1 for token in tokens):
        return _PLAIN.format(text)  # the parser drops the content of deeper blocks
    html = parser.renderer.render(tokens, parser.options, env)
    return Markup(html)  # noqa: S704 - the parser escapes its input


class _Renderer(RendererHTML):
    """A renderer that renders links without a referrer, and images as links."""

    def link_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render a link that sends no referrer."""
        tokens[idx].attrSet("rel", _REL)
        tokens[idx].attrSet("target", "_blank")
        return self.renderToken(tokens, idx, options, env)

    def cell_open(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render a table cell; its alignment is a class, because inline styles are forbidden."""
        style = str(tokens[idx].attrs.pop("style", ""))
        if style:
            tokens[idx].attrSet("class", style.replace(":", "-"))
        return self.renderToken(tokens, idx, options, env)

    th_open = td_open = cell_open

    def image(self, tokens: Tokens, idx: int, options: Any, env: Env) -> str:
        """Render an image as a link with its name."""
        token = tokens[idx]
        label = escape(token.content or "image")
        url = str(token.attrs.get("src", ""))
        if not is_safe_link(url):
            return f'<span class="image-link">{label}</span>'
        return (
            f'<a class="image-link" href="{escape(url)}" rel="{_REL}" target="_blank">{label}</a>'
        )


@lru_cache(maxsize=1)
def _get_parser() -> MarkdownIt:
    options: dict[str, Any] = {"html": False, "linkify": False, "maxNesting": MAX_NESTING}
    parser = MarkdownIt("commonmark", options, renderer_cls=_Renderer)
    parser.enable(["table", "strikethrough"])
    check: Callable[[str], bool] = is_safe_link
    parser.validateLink = check
    return parser
