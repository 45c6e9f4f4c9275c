"""Tests of the charts: scale, text description and escaping."""

import re
from collections.abc import Sequence
from typing import Any

from for_each import for_each
from kedge import analytics
from kedge._internal.display import NO_VALUE
from kedge.analytics import Analytics, ConversationStats, Cost, Count, Latency, ModelStats, Tokens
from kedge.web.dashboard import build_breakdowns, build_series
from kedge.web.page_templates import get_environment, render
from kedge.web.svg import Chart

LABELS = ("09:00", "10:00", "11:00")
Series = dict[str, list[float | None]]


def draw(name: str, *values: object) -> str:
    """Return the HTML of a macro of the charts."""
    macros: Any = get_environment().get_template("charts.html").module
    return str(getattr(macros, name)(*values))


def make_chart(series: Series, labels: Sequence[str] = LABELS, title: str = "x") -> Chart:
    """Return a chart with stacked bars."""
    return Chart(title, labels=labels, series=series)


def test_bars_are_stacked_to_scale() -> None:
    """The axis has a round maximum, each interval one title for its bars, and an empty interval has no bar."""
    svg = draw("chart", make_chart({"a": [10, 20, 0], "b": [5, 10, 0]}))
    assert '<span class="most">30</span>' in svg
    assert 'class="solid" x="202.00" y="46.67" width="196.00" height="93.33"' in svg
    assert 'class="hollow" x="202.00" y="0.00" width="196.00" height="46.67"' in svg
    assert "<title>10:00: a 20, b 10</title>" in svg
    assert svg.count("<g>") == 2


def test_missing_values_are_gaps_of_a_line() -> None:
    """A value between gaps is a dot."""
    svg = draw("chart", Chart("Latency", kind="lines", labels=LABELS, series={"p50": [1, None, 2]}))
    assert 'd="M0.0 70.0h0.01M600.0 0.0h0.01"' in svg


def test_neighboring_values_are_connected() -> None:
    """A line has one segment from each value to the next, and begins again after a gap."""
    labels = ("a", "b", "c", "d")
    chart = Chart("x", kind="lines", labels=labels, series={"p": [1, 2, None, 2]})
    ((_, path, points),) = chart.iter_lines()
    assert path == "M0.0 70.0h0.01L200.0 0.0M600.0 0.0h0.01"
    assert [words for words, _ in points] == ["a: p 1", "b: p 2", "d: p 2"]


def test_charts_have_descriptions() -> None:
    """The description has the newest and the highest value of each series."""
    chart = make_chart({"sent": [1, 9, 4], "saved": [None, None, None]})
    assert chart.description == "sent: 4 at the end, 9 at most. saved: no values."
    assert "<desc" in draw("chart", chart)
    assert 'role="img"' in draw("chart", chart)


@for_each(
    ("part", "whole", "width"),
    [(1, 1_000_000, "0.60"), (0, 100, "0.00"), (300, 100, "100.00"), (3, 0, "0.60")],
)
def test_share_is_visible_and_limited(part: int, whole: int, width: str) -> None:
    """A small share is visible, none is not, and a share is never wider than its bar."""
    assert f'class="part" width="{width}"' in draw("share_bar", part, whole, "x")


def test_names_are_escaped() -> None:
    """Titles, labels and model names are escaped."""
    bad = "<script>"
    html = draw("chart", make_chart({bad: [1, 2], "b": [0, 1]}, [bad, bad], bad))
    html += draw("ranking", bad, bad, [Count(bad, 1)], bad)
    html += draw("share_bar", 1, 2, bad)
    assert "<script" not in html


def test_breakdown_rows_add_up_to_total() -> None:
    """Conversations that are not listed are combined in one row; a cost without a price is unknown."""
    tokens, cost = Tokens(100, 0, 50, 0), Cost(3.0, 8, 2)
    requests = analytics.Requests(total=10, succeeded=9, failed=1, conversations=3)
    stats = Analytics(
        analytics.Selection(), requests, analytics.Chains(), analytics.Branching(),
        tokens, cost, Latency(),
        (ModelStats("openai", "gpt", 10, 9, 1, 0, Latency(), tokens, cost),),
    )  # fmt: skip
    listed = [
        ConversationStats("c<1>", "", 6, 6, 0, 0, 0, 5, 1, 1, Tokens(60, 0, 30, 0), Cost(2.0, 6)),
        ConversationStats("c2", "Two", 2, 1, 1, 0, 0, 1, 1, 1, Tokens(20, 0, 10, 0), Cost(0, 0, 2)),
    ]
    breakdowns = build_breakdowns(stats, listed)
    assert [name for name, _, _ in breakdowns["Model"]] == ["openai:gpt", "Total"]
    (name, first, url), (_, second, _), (other, rest, _), (_, total, _) = breakdowns["Conversation"]
    assert (name, url) == ("c<1>", "/conversations/c%3C1%3E")
    assert (second.errors, second.priced) == (1, 0)
    assert (other, rest.requests, rest.errors, rest.dollars) == ("1 other", 2, 0, 1.0)
    assert (total.dollars, total.unpriced) == (3.0, 2)
    assert total == tuple(map(sum, zip(first, second, rest, strict=True)))
    view = {
        "stats": stats,
        "failures": (),
        "labels": (),
        "series": build_series(()),
        "planning_seconds": None,
        "call_ids": (),
        "breakdowns": breakdowns,
    }
    html = render("figures.html", view=view)
    costs = re.findall(r'data-label="Cost">(.*?)<', html)
    last = "$3.00 + 2 without a price"
    assert costs == [last, last, "$2.00", NO_VALUE, "$1.00", last]
