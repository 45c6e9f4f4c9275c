"""Tests of the Markdown renderer: allowed HTML, safe links and size limit."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.web.markdown import MAX_LENGTH, is_safe_link, to_html

ALLOWED = {
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {"href", "title", "rel", "target", "class", "start"}


class _TagCollector(HTMLParser):
    """An HTML parser that collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}


def parse_html(html: str) -> _TagCollector:
    """Return the tags and attributes of a piece of HTML."""
    reader = _TagCollector()
    reader.feed(html)
    reader.close()
    return reader


PIECES = st.sampled_from(
    [
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))",
        "![a](https://evil.example/x.png)", "![a](data:text/html;base64,PHNjcmlwdD4=)", "<!--", "-->",
        "<svg onload=alert(1)>", "[a]: javascript:alert(1)", "[a]", "`", "```", "\n\n", "> ", "- ", "|",
        "\n|:-|-:|\n", "&lt;script&gt;", "&#x6a;avascript:alert(1)", "<javascript:alert(1)>", "<a href='",
        "<https://a.example/'onclick='alert(1)>", "](", ")", "\"", "'", "<", ">", "&", "*", "_", "~~",
        "\\", "<style>*{display:none}</style>", "<iframe src=//evil.example>", "\t", "#", "1. ",
    ]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=8), max_size=25).map("".join))
def test_output_has_only_allowed_tags_and_attributes(text: str) -> None:
    """Any input renders without scripts, styles, images, event handlers or unsafe URLs."""
    reader = parse_html(to_html(text))
    assert reader.tags <= ALLOWED
    assert {name for name, _ in reader.attributes} <= ATTRIBUTES
    links = [value for name, value in reader.attributes if name == "href"]
    assert all(re.match(r"(https?://|mailto:)", link) for link in links)


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://example.com/a?b#c", True),
        ("HTTP://example.com", True),
        ("mailto:ada@example.com", True),
        ("javascript:alert(1)", False),
        ("JaVaScRiPt:alert(1)", False),
        ("java\nscript:alert(1)", False),
        ("data:text/html,x", False),
        ("vbscript:x", False),
        ("//evil.example", False),
        ("/dashboard", False),
        ("file:///etc/passwd", False),
        ("http://[bad", False),
        ("https:", False),
    ],
)
def test_only_web_and_mail_links_are_safe(url: str, safe: bool) -> None:
    """Other schemes and links to the page's own paths are unsafe, because a click might change data."""
    assert is_safe_link(url) is safe


def test_common_markdown_is_rendered() -> None:
    """Emphasis, tables with alignment classes and code blocks are rendered."""
    html = to_html("**a** ~~b~~\n\n| x | y |\n|:-:|--:|\n| 1 | 2 |\n\n```python\na < b\n```\n")
    assert "<strong>a</strong> <s>b</s>" in html
    assert '<td class="text-align-right">2</td>' in html
    assert '<code class="language-python">a &lt; b' in html
    assert "style=" not in html


def test_links_have_no_referrer_and_images_become_links() -> None:
    """Links send no referrer, and an image becomes a link with its alternative text."""
    html = to_html("[a](https://a.example) ![cat <3](https://b.example/c.png)")
    assert html.count('rel="noopener noreferrer nofollow ugc"') == 2
    assert "cat &lt;3</a>" in html
    assert "<img" not in html


def test_very_long_text_is_not_parsed() -> None:
    """Text above the length limit is shown as preformatted, escaped text."""
    html = to_html("**<b>**" * MAX_LENGTH)
    assert html.startswith("<pre")
    assert "<b>" not in html


@pytest.mark.parametrize("depth", [5, 9, 10, 20, 40])
def test_deeply_nested_blocks_are_shown(depth: int) -> None:
    """No text is dropped at any depth of lists and quotes."""
    items = [f"item {number}." for number in range(depth)]
    nested = "\n".join(f"{'  ' * number}- {item}" for number, item in enumerate(items))
    quoted = "\n".join(f"{'> ' * number}{item}\n" for number, item in enumerate(items))
    for text in (nested, quoted):
        html = to_html(text)
        assert [item for item in items if item not in html] == []
