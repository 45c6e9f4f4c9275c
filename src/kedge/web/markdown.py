"""Convert Markdown from a model to safe HTML.

The text of a model is untrusted. Raw HTML is shown as text; only links to web and mail addresses are
allowed, and they send no referrer; remote images are not loaded, but named and linked. The
Content-Security-Policy is an additional protection.
"""

from collections.abc import Callable, MutableMapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

SAFE_SCHEMES = frozenset({"http", "https", "mailto"})
"""The allowed schemes of links."""
MAX_LENGTH = 100_000
"""Longer texts are shown as plain text: parsing them would take too long."""

MAX_NESTING = 20
"""Texts with deeper nested blocks are shown as plain text."""

_PLAIN = Markup("<pre class='plain'>{}</pre>")
_REL = "noopener noreferrer nofollow ugc"


def to_html(text: str) -> Markup:
    """Convert Markdown to safe HTML."""
    if len(text) > MAX_LENGTH:
        return _PLAIN.format(text)
    parser = _get_parser()
    env: dict[str, Any] = {}
    tokens = parser.parse(text, env)
    if any(token.nesting == 1 and token.level >= MAX_NESTING - 1 for token in tokens):
        return _PLAIN.format(text)  # the parser drops the content of deeper blocks
    html = parser.renderer.render(tokens, parser.options, env)
    return Markup(html)  # noqa: S704 - the parser escapes its input


def is_safe_link(url: str) -> bool:
    """Return whether a link is allowed."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return False
    if any(ord(character) < 33 for character in url):
        return False
    return parts.scheme.lower() in SAFE_SCHEMES and bool(parts.netloc or parts.scheme == "mailto")


class _Renderer(RendererHTML):
    """A renderer that renders links without a referrer, and images as links."""

    def link_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        """Render a link that sends no referrer."""
        tokens[idx].attrSet("rel", _REL)
        tokens[idx].attrSet("target", "_blank")
        return self.renderToken(tokens, idx, options, env)

    def cell_open(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
        """Render a table cell; its alignment is a class, because inline styles are forbidden."""
        style = str(tokens[idx].attrs.pop("style", ""))
        if style:
            tokens[idx].attrSet("class", style.replace(":", "-"))
        return self.renderToken(tokens, idx, options, env)

    th_open = td_open = cell_open

    def image(
        self, tokens: Sequence[Token], idx: int, options: Any, env: MutableMapping[str, Any]
    ) -> str:
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
