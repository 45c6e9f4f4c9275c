"""The page: two thousand responses in one tree, laid out, drawn by the server and drawn by Chromium.

Layout is given against reading the same tree as JSON once, in the same run. Times of whole pages are
those that somebody waits for.
"""

import asyncio
import json
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table import Row, cpu_seconds
from kedge.providers import connect
from kedge.server.run import Server, bind
from kedge.server.settings import Settings
from kedge.store import Node as StoredNode
from kedge.store import ResponseRow, open_store
from kedge.store.database import Tx
from kedge.store.forms import write_block
from kedge.store.nodes import insert_node
from kedge.store.overview import tree_of
from kedge.turns import assistant, user
from kedge.web.chains import chain_of
from kedge.web.desk import Desk
from kedge.web.drawing import draw_lanes
from kedge.web.layout import Node, Sums, lay_out
from kedge.web.rendering import render
from kedge.web.serving import PageSettings, with_page

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

RESPONSES = 2_000
CONVERSATIONS = 10_000


def run() -> list[Row]:
    """Measure layout, drawing, the whole page, the list, and Chromium."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder) / 'kedge.db'}"
        name = asyncio.run(_fill(store))
        return [*_layout(), *asyncio.run(_pages(store, name)), *_browser(store, name)]


def _layout() -> list[Row]:
    rng = random.Random(1)
    nodes = [Node("0", sums=Sums(1, 10, 1, 2))]
    for number in range(1, RESPONSES):
        parent = nodes[-1] if rng.random() < 0.8 else rng.choice(nodes[-40:])
        nodes.append(Node(str(number), parent.id, f"Question {number}", sums=Sums(1, 10, 1, 2)))
    written = json.dumps([[each.id, each.parent, each.label, [1, 10, 1, 2]] for each in nodes])
    read = cpu_seconds(lambda: json.loads(written))
    chosen = nodes[-1].id
    laid = cpu_seconds(lambda: lay_out(nodes, chosen))
    layout = lay_out(nodes, chosen)
    drawn = cpu_seconds(lambda: draw_lanes(layout))
    what = f"of {RESPONSES:,} responses / json.loads of them"
    return [
        Row(f"layout {what}", laid / read, detail=f"{laid * 1e3:.1f} ms"),
        Row(f"lanes {what}", drawn / read, detail=f"{drawn * 1e3:.1f} ms"),
    ]


async def _fill(url: str) -> str:
    """A tree of two thousand responses, and ten thousand conversations beside it."""
    async with await open_store(url) as store:
        row = await store.create("A tree of responses")
        root = await store.node(row, row.head)
        head = await store.database.write(lambda tx: _grow(tx, root, row.number))
        await store.move_head(row, head, head=row.head)
        await store.database.write(lambda tx: _list(tx, row.tree))
    return row.id


def _grow(tx: Tx, root: StoredNode, conversation: int) -> StoredNode:
    rng = random.Random(1)
    ends = [root]
    for number in range(RESPONSES):
        parent = ends[-1] if rng.random() < 0.8 else rng.choice(ends[-40:])
        said = [write_block(user(f"Question {number}"))]
        now = time.time()
        asked, _ = insert_node(tx, parent, said, number=conversation, kind="asked", now=now)
        response = ResponseRow(
            provider="practice",
            scope="grown",
            provider_response_id=f"resp_{number}",
            created_at=now,
        )
        answered, _ = insert_node(
            tx,
            asked,
            [write_block(assistant(f"Answer {number}"))],
            number=conversation,
            kind="answered",
            now=now,
            response=response,
        )
        ends.append(answered)
    return ends[-1]


def _list(tx: Tx, tree: int) -> None:
    rows = [(f"c{n}", f"Talk {n}", tree, tree, n, n) for n in range(CONVERSATIONS)]
    tx.run_many(
        "INSERT INTO conversations (id, title, archived, tree, head, created_at, updated_at) "
        "VALUES (?, ?, 0, ?, ?, ?, ?)",
        rows,
    )


async def _pages(url: str, name: str) -> list[Row]:
    async with await open_store(url) as store, connect("practice") as engine:
        desk = Desk(store, engine)
        row = await store.conversation(name)
        tree = await tree_of(store, row)
        chain = cpu_seconds(lambda: chain_of(tree, 0.0), repeat=3)
        view = await desk.view(name)
        drawn = cpu_seconds(
            lambda: render("conversation.html", here="conversations", view=view), repeat=3
        )
        start = time.perf_counter()
        await desk.view(name)
        read = time.perf_counter() - start
    return [
        Row("tree to graph", chain * 1e3, unit="ms"),
        Row("read and lay out a page", read * 1e3, 500, "ms", f"{RESPONSES:,} responses"),
        Row("render it as HTML", drawn * 1e3, 500, "ms"),
    ]


def _browser(store: str, name: str) -> list[Row]:
    """How long Chromium takes from asking until the page is drawn."""
    path = shutil.which("chromium")
    if path is None:
        return []
    from playwright.sync_api import sync_playwright

    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready, servers = threading.Event(), list[Server]()

    async def serve() -> None:
        async with with_page(Settings(), PageSettings(store), url, ready.set) as server:
            servers.append(server)
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page()
        times = {what: _drawn(tab, url + where) for what, where in _places(name).items()}
        browser.close()
    servers[0].stop()
    thread.join()
    return [
        Row(
            f"Chromium draws {what}",
            cpu,
            1000,
            "ms",
            f"CPU of its main thread; {wall:.0f} ms from asking to drawn on this machine now",
        )
        for what, (wall, cpu) in times.items()
    ]


def _places(name: str) -> dict[str, str]:
    return {
        f"{RESPONSES:,} responses in one tree": f"/conversations/{name}",
        f"a list of {CONVERSATIONS:,} conversations": "/",
    }


_PAINTED = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
    done(performance.now()))))"""


def _drawn(tab: "Page", url: str) -> tuple[float, float]:
    """Milliseconds until two frames after the page was loaded, and those of CPU; the least of five."""
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found: list[tuple[float, float]] = []
    for _ in range(5):
        tab.goto("about:blank")
        before = _busy(session)
        tab.goto(url)
        wall = tab.evaluate(_PAINTED)
        found.append((wall, (_busy(session) - before) * 1e3))
    walls, cpus = zip(*found, strict=True)
    return min(walls), min(cpus)


def _busy(session: "CDPSession") -> float:
    """Seconds that the main thread of the tab has worked so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")
