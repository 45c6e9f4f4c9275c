"""Tests of the Markdown renderer: allowed HTML, safe links and size limit."""

import cProfile
import re
import string
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge._internal.display import MAX_MARKDOWN_WORK, estimate_markdown_work
from kedge.web import markdown
from kedge.web.markdown import (
    MAX_CACHED_CHARS,
    MAX_LENGTH,
    MAX_PAGE_WORK,
    PageMarkdown,
    is_safe_link,
)

ALLOWED = {
    "a", "blockquote", "br", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {"href", "title", "rel", "target", "class", "start"}


def to_html(text: str) -> str:
    """Convert the only Markdown text of a page."""
    return PageMarkdown().render(text)


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


def test_only_web_and_mail_links_are_safe() -> None:
    """Other schemes and links to the page's own paths are unsafe, because a click might change data."""
    assert all(map(is_safe_link, ("https://example.com/a?b#c", "mailto:ada@example.com")))
    scripts = ("javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x")
    others = ("//evil.example", "/dashboard", "http://[bad", "https:")
    assert not any(map(is_safe_link, (*scripts, *others)))


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
    html = to_html("<b>" + "a" * MAX_LENGTH)
    assert "Shown as plain text" in html
    assert "<pre class='plain'>&lt;b&gt;aaa" in html


@for_each("depth", [5, 9, 10, 20, 40])
def test_deeply_nested_blocks_are_shown(depth: int) -> None:
    """No text is dropped at any depth of lists and quotes."""
    items = [f"item {number}." for number in range(depth)]
    nested = "\n".join(f"{'  ' * number}- {item}" for number, item in enumerate(items))
    quoted = "\n".join(f"{'> ' * number}{item}\n" for number, item in enumerate(items))
    for text in (nested, quoted):
        html = to_html(text)
        assert [item for item in items if item not in html] == []


SPECIAL = string.punctuation + " \n\ta1é"
UNITS = [*SPECIAL, *(a + b for a in SPECIAL for b in SPECIAL if a < b)]
"""Characters and pairs. A repeated pair is the repeated pair in the other order, except at its ends."""
CALLS_PER_WORK = 8
"""Calls of functions for a unit of work: a unit is about a microsecond."""


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions are called."""
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


def test_every_pair_of_special_characters_stays_within_the_budget() -> None:
    """A text of one or two repeated characters takes no more work than estimated, nor than the budget."""
    for unit in UNITS:
        text = unit * 50_000
        allowed = CALLS_PER_WORK * MAX_MARKDOWN_WORK
        if estimate_markdown_work(text) > MAX_MARKDOWN_WORK:
            allowed = 500
        assert count_calls(lambda text=text: to_html(text)) < allowed, unit
        short = unit * 100
        allowed = CALLS_PER_WORK * (estimate_markdown_work(short) + 1_000)
        assert count_calls(lambda text=short: to_html(text)) < allowed, unit


WORST = ["![a](", "- a\n", "<a", "**a"]
BAD = [
    *WORST, "![", "[a](", "[a][", "[][", "[!", "|a|\n|-|\n", "a\n|-|\n", "> a\n", "a\n===\n", "[a]: b\n",
    "*a_", "~~a", "&a;", "``a ", "> - ", "\t- ", "1. a\n", "| | |\n", "](<b", "<a@b", "*a **b ",
]  # fmt: skip


@pytest.mark.parametrize(("units", "share"), [(WORST, 1), (BAD, 8)])
def test_the_worst_texts_within_the_budget(units: list[str], share: int) -> None:
    """Texts of known bad patterns that use all or a share of the budget take no more work than estimated."""
    for unit in units:
        work = MAX_MARKDOWN_WORK // share
        text = (unit * (work // estimate_markdown_work(unit)))[:MAX_LENGTH]
        assert count_calls(lambda text=text: to_html(text)) < CALLS_PER_WORK * work, unit


def test_the_texts_of_a_page_have_one_budget() -> None:
    """Texts beyond the budget of a page are shown as plain text, with a note; short ones may still fit."""
    page = PageMarkdown()
    texts = [f"{number} **b** " + "[a](b) " * 2_000 for number in range(8)]
    plain = ["Shown as plain text" in page.render(text) for text in texts]
    assert plain == [False] * plain.index(True) + [True] * (len(texts) - plain.index(True))
    assert sum(map(estimate_markdown_work, texts[: plain.index(True)])) <= MAX_PAGE_WORK
    assert "<b>" not in page.render("<b>")


def test_rendered_texts_are_cached_by_content() -> None:
    """The second rendering of a text takes a constant number of calls, and the cache has a limited size."""
    text = "cached **text** " * 1_000
    first, second = (count_calls(lambda: to_html(text)) for _ in range(2))
    assert second < 100 < first
    for number in range(20):
        to_html(f"{number}" + "a" * 99_000 + "\n\n" + "b" * 900)
    cache = markdown._cache
    assert cache._size <= MAX_CACHED_CHARS
    assert cache._size == sum(len(a) + len(b) for a, b in cache._entries.items())
