"""How ``kedge stats`` looks: tables, bars, and lines of small blocks."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge.analytics import Analytics, Bucket, Count, ModelStats

BLOCKS = " ▁▂▃▄▅▆▇█"
BAR = 24


def show(found: Analytics, pieces: Sequence[Bucket]) -> None:
    """Print everything."""
    console = Console(highlight=False, soft_wrap=True)
    if not found.requests.total:
        console.print("There is nothing to tell: no request in this range.")
        return
    console.print(_overview(found))
    if len(pieces) > 1:
        console.print(_over_time(pieces))
    for title, counts in (
        ("Fallbacks by reason", found.requests.fallbacks),
        ("Healed by reason", found.requests.healed),
    ):
        if counts:
            console.print(_bars(title, [(each.name, each.count) for each in counts]))
    lengths = _binned(found.chains.lengths)
    console.print(_bars("Chains by length", lengths))
    console.print(_models(found.models))


def sparkline(values: Iterable[float]) -> str:
    """Values as a line of blocks; nothing is a blank, the least of something is seen."""
    listed = list(values)
    most = max(listed, default=0)
    if not most:
        return " " * len(listed)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[max(round(each / most * top), 1 if each else 0)] for each in listed)


def _overview(found: Analytics) -> Table:
    table = Table.grid(padding=(0, 2))
    requests, chains, branching = found.requests, found.chains, found.branching
    statuses = ", ".join(_count(each) for each in requests.statuses)
    sent = f"{_size(requests.sent_bytes)}; {_size(requests.saved_bytes)} saved"
    cached = f"{found.tokens.input} in ({_share(found.tokens.cached_share)} cached)"
    chained = f"{requests.chained} ({_share(requests.chained_share)})"
    rows = (
        ("requests", f"{requests.total} in {requests.conversations} conversations ({statuses})"),
        ("answered", _share(requests.success_rate)),
        ("chained", f"{chained}, {requests.full} in full"),
        ("refused", f"{requests.rejections}; {requests.forgotten} forgotten"),
        ("without an id", str(requests.without_id)),
        ("chains", f"{chains.count}, mean {chains.mean or 0:.1f}, longest {chains.longest}"),
        ("branches", f"{branching.branches} at {branching.points} points, {branching.forks} forks"),
        ("sent", f"{sent} ({_share(requests.saved_share)})"),
        ("tokens", f"{cached}, {found.tokens.output} out"),
        ("cost", _cost(found.cost.dollars, found.cost.unpriced)),
        ("latency", f"median {_time(found.latency.median)}, 95 % {_time(found.latency.p95)}"),
    )
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def _over_time(pieces: Sequence[Bucket]) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = (
        ("requests", [float(each.requests) for each in pieces]),
        ("chained", [float(each.chained) for each in pieces]),
        ("tokens", [float(each.tokens.input + each.tokens.output) for each in pieces]),
        ("latency", [each.latency.median or 0.0 for each in pieces]),
    )
    table.add_row("")
    for name, values in rows:
        table.add_row(Text(name, style="dim"), Text(sparkline(values), style="cyan"))
    return table


def _bars(title: str, counts: Sequence[tuple[str, int]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("")
    table.add_row(Text(title, style="bold"))
    most = max((count for _, count in counts), default=1)
    for name, count in counts:
        bar = "█" * max(round(count / most * BAR), 1)
        table.add_row(Text(name, style="dim"), str(count), Text(bar, style="cyan"))
    return table


def _models(models: Sequence[ModelStats]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("provider", "model", "requests", "answered", "median", "95 %", "tokens", "cost"):
        justify = "left" if name in ("provider", "model") else "right"
        table.add_column(name, justify=justify)
    for each in models:
        table.add_row(
            each.provider,
            each.model or "?",
            str(each.requests),
            _share(each.success_rate),
            _time(each.latency.median),
            _time(each.latency.p95),
            str(each.tokens.input + each.tokens.output),
            _cost(each.cost.dollars, each.cost.unpriced),
        )
    return table


def _binned(lengths: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """Lengths in bins of doubling width: 1, 2, 3-4, 5-8 and so on."""
    bins: dict[int, int] = {}
    for length, count in lengths:
        place = (length - 1).bit_length()
        bins[place] = bins.get(place, 0) + count
    shown: list[tuple[str, int]] = []
    for place, count in sorted(bins.items()):
        low, high = (2 ** (place - 1) + 1 if place else 1), 2**place
        shown.append((str(high) if low == high else f"{low}-{high}", count))
    return shown


def _count(count: Count) -> str:
    return f"{count.count} {count.name}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _cost(dollars: float, unpriced: int) -> str:
    told = f"${dollars:.4f}"
    return f"{told} + {unpriced} unpriced" if unpriced else told


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count = count // 1000
    return f"{count} GB"
