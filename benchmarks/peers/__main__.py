"""Run the scripts with every library and print one table; ``make bench-peers`` installs them first.

    python -m benchmarks.peers ENVIRONMENTS [NAME …]

``ENVIRONMENTS`` is a folder with a virtual environment per library. Every library is used as its own
documentation recommends (the docstrings of ``peer_*.py`` say how), in a process of its own, on the same strict
server with the same seeded scripts. CPU time is that of the library's process: the library and the bare client take
turns, and the median of the ratios of neighboring turns counts, because the speed of a busy machine varies. The
second table has the same libraries replaying their history through ``kedge.chain``. Both are written to
docs/peers.md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from benchmarks.peers.judge import Item, Judge, Score
from benchmarks.peers.scripts import (
    SCRIPTS,
    Operation,
    make_long_script,
    make_script,
    make_stream_script,
)
from kedge.testing import TestServer, serve

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "peers.md"
BASELINE = "openai"
PEERS = ("kedge", "openai", "pydantic-ai", "openai-agents", "langgraph", "agent-framework")
SEEDS = 1
TURNS, AROUND = 60, 9
ANSWERS, WORDS = 8, 200
BEGIN, END = "<!-- table of make bench-peers -->\n", "<!-- end of the table -->\n"


class PeerProcess:
    """A library in its own process, driven by operations."""

    def __init__(self, name: str, python: Path, base_url: str, folder: str, chained: bool) -> None:
        driver = str(FOLDER / "driver.py")
        command = [str(python), driver, name.replace("-", "_"), base_url, folder]
        self._process = subprocess.Popen(
            command + ["--chain"] * chained,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def apply(self, operation: Operation) -> dict[str, Any]:
        """Apply an operation and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(operation) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args}: ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@dataclass
class Result:
    """The figures of a library; CPU times are ratios to those of the bare client."""

    name: str
    version: str = ""
    durable: bool = False
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    turn_10: float = 0.0
    turn_60: float = 0.0
    event: float = 0.0
    imports: float = 0.0
    megabytes: float = 0.0
    packages: int = 0

    @property
    def total(self) -> Score:
        """The figures of all scripts."""
        total = Score()
        for score in self.scores.values():
            total.add(score)
        return total


class Runner:
    """Runs one library in one way."""

    def __init__(self, name: str, environments: Path, chained: bool) -> None:
        self.name = name
        self.chained = chained
        self.python = Path(sys.executable)
        if name != "kedge":
            self.python = environments / name / "bin" / "python"

    @contextmanager
    def start(self, server: TestServer) -> Generator[PeerProcess]:
        """Run the library in its own process for as long as the block lasts."""
        with tempfile.TemporaryDirectory() as folder:
            peer = PeerProcess(self.name, self.python, server.base_url, folder, self.chained)
            try:
                yield peer
            finally:
                peer.close()

    def run_script(self, script: Sequence[Operation]) -> Score:
        """Run a script and judge it. A message that fails is sent once more, as a user would."""
        judge = Judge()
        with serve() as server, self.start(server) as peer:
            for operation in script:
                if "server" in operation:
                    _change_server(server, operation)
                    judge.forget(for_good=operation["server"] == "fault")
                elif operation["op"] != "send":
                    answer = peer.apply(operation)
                    assert not answer["error"], f"{self.name}: {operation}: {answer['error']}"
                    judge.apply(operation)
                elif not self._send(server, peer, judge, operation["text"]):
                    self._send(server, peer, judge, operation["text"])
        return judge.score

    def _send(self, server: TestServer, peer: PeerProcess, judge: Judge, text: str) -> bool:
        before = len(server.requests)
        answer = peer.apply({"op": "send", "text": text})
        requests = [each for each in server.requests[before:] if each.method == "POST"]
        answered = [each.response_id for each in requests if each.response_id]
        outputs = [_read_output(server, each, answer["text"]) for each in answered]
        judge.judge_turn(text, requests, outputs, answer["error"])
        return not answer["error"]

    def compare(self, baseline: "Runner", script: Sequence[Operation]) -> list[float]:
        """Return the ratio of the CPU times of each operation, which both apply one after the other."""
        with (
            serve() as server,
            serve() as other,
            self.start(server) as peer,
            baseline.start(other) as base,
        ):
            return [peer.apply(each)["cpu"] / base.apply(each)["cpu"] for each in script]

    def describe(self) -> dict[str, Any]:
        """Return the version, the size and the import time of the library."""
        command = [str(self.python), str(FOLDER / "size.py"), self.name.replace("-", "_")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def _change_server(server: TestServer, operation: Operation) -> None:
    if operation["server"] == "forget":
        server.forget()
    else:
        server.faults.set(operation["fault"])


def _read_output(server: TestServer, response_id: str, text: str) -> list[Item]:
    """Return the output of a response; of one that is not stored, the text that the program received."""
    response = httpx2.get(f"{server.base_url}/responses/{response_id}", timeout=60)
    if response.status_code == httpx2.codes.NOT_FOUND:
        return [{"role": "assistant", "content": text}]
    return response.raise_for_status().json()["output"]


def run_peer(name: str, environments: Path, chained: bool) -> Result:
    """Run everything with one library."""
    runner = Runner(name, environments, chained)
    baseline = Runner(BASELINE, environments, chained=False)
    result = Result(name, **runner.describe())
    result.imports /= baseline.describe()["imports"]
    for script in SCRIPTS:
        total = result.scores[script] = Score()
        for seed in range(SEEDS):
            total.add(runner.run_script(make_script(script, seed)))
    turns = runner.compare(baseline, make_long_script(TURNS))
    result.turn_10 = median(turns[10 - AROUND : 10])
    result.turn_60 = median(turns[-AROUND:])
    result.event = median(runner.compare(baseline, make_stream_script(ANSWERS, WORDS))[1:])
    _show(f"{name}{' with kedge.chain' if chained else ''}: {result.total}")
    return result


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def format_tables(results: Sequence[Result], chained: Sequence[Result]) -> str:
    """Return the tables in Markdown."""
    lines = [
        "| | " + " | ".join(f"{each.name} {each.version}" for each in results) + " |",
        "|---" * (len(results) + 1) + "|",
    ]

    def add(label: str, cells: Iterable[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    def add_scores(all_results: Sequence[Result]) -> None:
        for script in SCRIPTS:
            scores = [each.scores[script] for each in all_results]
            add(f"{script}: incoherent, errors", (f"{s.incoherent}, {s.errors}" for s in scores))
        totals = [each.total for each in all_results]
        add("all requests", (str(s.requests) for s in totals))
        add("all incoherent requests", (f"**{s.incoherent}**" for s in totals))
        add("all errors", (f"**{s.errors}**" for s in totals))
        add("bytes uploaded, best plan = 1", (f"{s.bytes / s.best:.2f}" for s in totals))

    def add_speed(all_results: Sequence[Result]) -> None:
        add("CPU of turn 10, openai = 1", (f"{each.turn_10:.2f}" for each in all_results))
        add("CPU of turn 60, openai = 1", (f"{each.turn_60:.2f}" for each in all_results))
        add("CPU per streamed word, openai = 1", (f"{each.event:.2f}" for each in all_results))

    add_scores(results)
    add_speed(results)
    add("every turn saved to disk", ("yes" if r.durable else "no" for r in results))
    add("import, openai = 1", (f"{each.imports:.2f}" for each in results))
    add("installed", (f"{r.megabytes:.0f} MB, {r.packages} packages" for r in results))
    if chained:
        lines += ["", "With `kedge.chain` under their clients, replaying:", ""]
        lines.append("| | " + " | ".join(f"{each.name} {each.version}" for each in chained) + " |")
        lines.append("|---" * (len(chained) + 1) + "|")
        add_scores(chained)
        add_speed(chained)
    return "\n".join(lines) + "\n"


def write_page(tables: str) -> None:
    """Replace the tables of the page by those of this run."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    PAGE.write_text(
        head + BEGIN + "\n" + tables + "\n" + END + rest.split(END)[1], encoding="utf-8"
    )


def main(environments: str, *names: str) -> None:
    """Run the libraries, print the tables and, for all of them, write the page."""
    selected = names or PEERS
    results = [run_peer(name, Path(environments), chained=False) for name in selected]
    others = [name for name in selected if name != "kedge"]
    chained = [run_peer(name, Path(environments), chained=True) for name in others]
    tables = format_tables(results, chained)
    print(tables)
    if not names:
        write_page(tables)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
