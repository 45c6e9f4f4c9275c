"""Markdown of pages: the worst known texts that are still rendered, and the worst known pages.

The baseline is a usual answer, with headings, lists, links, a table and code, whose length makes its estimated work
equal to the budget of a text. A ratio far above 1 means that the estimate is too low for that text.
"""

from functools import partial
from itertools import count

from benchmarks.table import Row, compare_cpu
from kedge._internal.display import MAX_MARKDOWN_WORK, estimate_markdown_work
from kedge.web.markdown import MAX_LENGTH, PageMarkdown

BASELINE = "a usual answer of the same estimated work"
USUAL = """\
## A heading

Some **bold** words, a [link](https://example.com/a?b=c), and `code`, in a paragraph of two
lines with a few _more_ words.

- one item
- another item, with *emphasis*

| a | b |
|---|---|
| 1 | 2 |

```python
def add(a: int, b: int) -> int:
    return a + b
```

"""
WORST = (
    "![", "![a](", "[a](", "[a][", "[!", "|a|\n|-|\n", "- a\n", "> a\n", "a\n===\n", "*a_", "**a", "<a", "&a;", "+",
)  # fmt: skip


_numbers = count()


def run() -> list[Row]:
    """Measure the worst texts within the budget, a page of them, and pages beyond the budget."""
    works = [partial(_render_all, [_fill_budget(unit)]) for unit in (USUAL, *WORST)]
    usual, *worst = compare_cpu(*works, repeat=3)
    rows = [
        Row(f"text of {unit!r}", each / usual, 3.0, detail=f"{each * 1e3:.0f} ms")
        for unit, each in zip(WORST, worst, strict=True)
    ]
    return [*rows, *_measure_pages(usual)]


def _measure_pages(usual: float) -> list[Row]:
    pages = {
        "page of 40 texts of '![a]('": partial(_render_all, [_fill_budget("![a](")] * 40),
        "page of 4 texts of '![' * 49,000": partial(_render_all, ["![" * 49_000] * 4),
    }
    return [
        Row(name, each / usual, detail=f"{each * 1e3:.0f} ms")
        for name, each in zip(pages, compare_cpu(*pages.values(), repeat=2), strict=True)
    ]


def _fill_budget(unit: str) -> str:
    """Return the longest text of this unit that is rendered."""
    times = min(MAX_MARKDOWN_WORK // estimate_markdown_work(unit), MAX_LENGTH // len(unit))
    return unit * times


def _render_all(texts: list[str]) -> None:
    """Render the texts of one page, none of them from the cache."""
    page = PageMarkdown()
    for text in texts:
        page.render(f"{next(_numbers)} {text}"[: len(text)])
