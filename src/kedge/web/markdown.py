"""Render the Markdown of a model as safe HTML.

The text of a model is untrusted. Raw HTML is shown as text; only links to web and mail addresses are allowed, and they
send no referrer; remote images are not loaded, but named and linked. The Content-Security-Policy is an additional
protection.

A parser cannot be interrupted, so its input is limited: a text whose syntax takes too much work is shown as plain
text, and so are all texts beyond the budget of a page. Rendered texts are cached by their content.
"""

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from functools import lru_cache
from html import escape
from threading import Lock
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

from kedge._internal.display import MAX_MARKDOWN_WORK, estimate_markdown_work
from kedge._internal.urls import is_safe_link

Tokens = Sequence[Token]
Env = MutableMapping[str, Any]

MAX_LENGTH = 100_000
"""Longer texts are shown as plain text."""
MAX_PAGE_WORK = 1_000_000
"""The work for all texts of a page; further texts are shown as plain text."""
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
