"""Replay a folder of recorded exchanges: ``make test-recordings RECORDINGS=FOLDER``. CONTRIBUTING.md describes it.

It prints counts for each API and host, what it does not read, and every difference; the exit code is 1 if there are
any differences.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import anyio
import httpx2

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from kedge.testing import serve
from recordings.conversations import chain_conversation, judge_conversation
from recordings.exchanges import Exchange, group_exchanges, read_folder
from recordings.replay import RecordedServer, replay, serve_recordings
from recordings.requests import check_messages, send_to_strict_server

DOCUMENTED = re.findall(r"`([\w.*]+)`", (ROOT / "docs" / "events.md").read_text())
"""The names in the documentation of events, some of them patterns."""


@dataclass(slots=True)
class Report:
    """The result of a replay."""

    replayed: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    differing: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    opaque: Counter[str] = field(default_factory=Counter[str])
    unread: Counter[str] = field(default_factory=Counter[str])
    limited: Counter[str] = field(default_factory=Counter[str])
    """The exchanges of which only a part is checked, by the reason."""
    judged: int = 0
    chained: int = 0
    differences: list[str] = field(default_factory=list[str])

    def add(self, exchange: Exchange, found: list[str]) -> None:
        """Add the differences of one exchange."""
        place = exchange.api, exchange.host
        self.replayed[place] += 1
        self.differing[place] += bool(found)
        self.differences += [f"{exchange.name}: {each}" for each in found]
        if not exchange.request:
            self.limited["have no recorded request to send to the strict server"] += 1
        if exchange.has_several_answers:
            self.limited["have several answers, of which the first is read"] += 1

    def check_documents(self) -> None:
        """Add the types of events that were passed on although no line of the documentation names them."""
        for kind in sorted(self.opaque):
            if not any(fnmatch(kind, name) for name in DOCUMENTED):
                self.differences.append(f"events of type {kind} are passed on and not documented")

    def print(self) -> None:
        """Print the counts, and then every difference."""
        for (api, host), count in sorted(self.replayed.items()):
            print(
                f"{api:10} {host:45} {count:5} exchanges, {self.differing[api, host]} with differences"
            )
        print(f"{self.judged} conversations judged, {self.chained} requests chained")
        print(f"{sum(self.opaque.values())} events of {len(self.opaque)} types passed on")
        for reason, count in sorted(self.limited.items()):
            print(f"{count} exchanges {reason}")
        for kind, count in sorted(self.unread.items()):
            print(f"not read: {count} exchanges ({kind})")
        print("\n".join(self.differences), end="\n" if self.differences else "")
        print(f"{len(self.differences)} differences")


async def check(exchanges: list[Exchange]) -> Report:
    """Replay exchanges, and return the report."""
    report = Report(unread=Counter(each.unread_kind for each in exchanges if each.unread_kind))
    exchanges = [each for each in exchanges if not each.unread_kind]
    with (
        serve_recordings() as (server, url),
        serve() as strict,
        serve(unknown_parameters="ignore") as lenient,
    ):
        async with httpx2.AsyncClient(timeout=60) as client:
            for seed, exchange in enumerate(exchanges):
                found = await replay_safely(exchange, server, url, seed, report)
                found += check_messages(exchange)
                found += await send_to_strict_server(
                    exchange, client, strict.base_url, lenient.base_url
                )
                report.add(exchange, found)
        for group in group_exchanges(exchanges):
            await check_conversation(group, server, url, report)
    report.check_documents()
    return report


async def replay_safely(
    exchange: Exchange, server: RecordedServer, url: str, seed: int, report: Report
) -> list[str]:
    """Replay an exchange; a recording of an unknown form is a difference."""
    try:
        return await replay(exchange, server, url, seed, report.opaque)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        return [f"the recording cannot be read: {type(error).__name__}: {error}"]


async def check_conversation(
    group: list[Exchange], server: RecordedServer, url: str, report: Report
) -> None:
    """Replay a conversation of several requests; only the Responses API has anchors."""
    group = [each for each in group if each.is_answer and not each.is_compaction]
    if len(group) < 2 or group[0].api == "messages":
        return
    report.judged += 1
    report.differences += await judge_conversation(group, server, url)
    if group[0].api == "chat":
        return
    chained, found = await chain_conversation(group, server, url)
    report.chained += chained
    report.differences += found


def main(folder: str) -> int:
    """Replay a folder, print the results, and return the exit code."""
    exchanges = read_folder(Path(folder))
    if not exchanges:
        print(f"no recorded exchanges in {folder}: it needs files with the ending .jsonl")
        return 2
    report = anyio.run(check, exchanges)
    report.print()
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
