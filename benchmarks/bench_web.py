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

from benchmarks.table import Row, compare_cpu, cpu_seconds
from kedge.presentation.layout import compute_layout
from kedge.presentation.response_tree import Totals, TreeNode, build_response_tree
from kedge.providers import connect
from kedge.server.settings import Settings
from kedge.server.uvicorn_server import UvicornServer, bind
from kedge.store import ConversationRow, RequestRecord, open_store
from kedge.store import Node as StoredNode
from kedge.store.append import insert_node
from kedge.store.database.transactions import Tx
from kedge.store.stored_blocks import to_stored_block
from kedge.store.tree import read_tree
from kedge.turns import assistant, user
from kedge.web.app import PageSettings, open_page_server
from kedge.web.models import ModelSelector
from kedge.web.page_templates import render
from kedge.web.service import ConversationService
from kedge.web.svg import draw_lanes

if TYPE_CHECKING:
    from playwright.sync_api import CDPSession, Page

BASELINE = "json.loads of the same tree"
RESPONSES = 2_000
CONVERSATIONS = 10_000


def run() -> list[Row]:
    """Measure layout, drawing, the whole page, the list, and Chromium."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder) / 'kedge.db'}"
        name = asyncio.run(_fill_store(store))
        return [
            *_measure_layout(),
            *asyncio.run(_measure_pages(store, name)),
            *_measure_browser(store, name),
        ]


def _measure_layout() -> list[Row]:
    rng = random.Random(1)
    nodes = [TreeNode(1, sums=Totals(1, 10, 1, 2))]
    for number in range(2, RESPONSES + 1):
        parent = nodes[-1] if rng.random() < 0.8 else rng.choice(nodes[-40:])
        nodes.append(TreeNode(number, parent.id, f"Question {number}", sums=Totals(1, 10, 1, 2)))
    encoded = json.dumps([[each.id, each.parent, each.label, [1, 10, 1, 2]] for each in nodes])
    selected = nodes[-1].id
    layout = compute_layout(nodes, selected)
    read, laid, drawn = compare_cpu(
        lambda: json.loads(encoded),
        lambda: compute_layout(nodes, selected),
        lambda: draw_lanes(layout),
    )
    label = f"of {RESPONSES:,} responses / json.loads of them"
    return [
        Row(f"layout {label}", laid / read, detail=f"{laid * 1e3:.1f} ms"),
        Row(f"lanes {label}", drawn / read, detail=f"{drawn * 1e3:.1f} ms"),
    ]


async def _fill_store(url: str) -> str:
    """A tree of two thousand responses, and ten thousand conversations beside it."""
    async with open_store(url) as store:
        row = await store.create("A tree of responses")
        root = await store.node(row, row.head)
        head = await store.database.write(lambda tx: _insert_tree(tx, root, row))
        await store.move_head(row, head, head=row.head)
        await store.database.write(lambda tx: _insert_conversations(tx, row.tree))
    return row.id


def _insert_tree(tx: Tx, root: StoredNode, conversation: ConversationRow) -> StoredNode:
    rng = random.Random(1)
    ends = [root]
    for number in range(RESPONSES):
        parent = ends[-1] if rng.random() < 0.8 else rng.choice(ends[-40:])
        blocks = [to_stored_block(user(f"Question {number}"))]
        now = time.time()
        node, _ = insert_node(tx, parent, blocks, conversation=conversation, kind="asked", now=now)
        response = RequestRecord(
            provider="practice",
            scope="grown",
            provider_response_id=f"resp_{number}",
            created_at=now,
        )
        answered, _ = insert_node(
            tx,
            node,
            [to_stored_block(assistant(f"Answer {number}"))],
            conversation=conversation,
            kind="answered",
            now=now,
            response=response,
        )
        ends.append(answered)
    return ends[-1]


def _insert_conversations(tx: Tx, tree: int) -> None:
    rows = [(f"c{n}", f"Conversation {n}", tree, tree, n, n) for n in range(CONVERSATIONS)]
    tx.run_many(
        "INSERT INTO conversations (id, title, archived, tree, head, created_at, updated_at) "
        "VALUES (?, ?, 0, ?, ?, ?, ?)",
        rows,
    )


async def _measure_pages(url: str, name: str) -> list[Row]:
    async with open_store(url) as store, connect("practice") as engine:
        service = ConversationService(store, ModelSelector(engine, ("practice",)))
        row = await store.conversation(name)
        tree = await read_tree(store, row)
        chain = cpu_seconds(lambda: build_response_tree(tree, 0.0), repeat=3)
        view = await service.load_view(name)
        drawn = cpu_seconds(
            lambda: render(
                "conversation.html",
                section="conversations",
                has_session=False,
                view=view,
                recent=(),
            ),
            repeat=3,
        )
        start = time.perf_counter()
        await service.load_view(name)
        read = time.perf_counter() - start
    return [
        Row("tree to graph", chain * 1e3, unit="ms"),
        Row("read and lay out a page", read * 1e3, 500, "ms", f"{RESPONSES:,} responses"),
        Row("render it as HTML", drawn * 1e3, 500, "ms"),
    ]


def _measure_browser(store: str, name: str) -> list[Row]:
    """How long Chromium takes from asking until the page is drawn."""
    path = shutil.which("chromium")
    if path is None:
        return []
    from playwright.sync_api import sync_playwright

    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ready, servers = threading.Event(), list[UvicornServer]()

    async def serve() -> None:
        async with open_page_server(Settings(), PageSettings(store), url, ready.set) as server:
            servers.append(server)
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page()
        times = {
            label: _measure_paint(tab, url + page_path)
            for label, page_path in _page_paths(name).items()
        }
        browser.close()
    servers[0].stop()
    thread.join()
    return [
        Row(
            f"Chromium draws {label}",
            cpu,
            1000,
            "ms",
            f"CPU of its main thread; {wall:.0f} ms from asking to drawn on this machine now",
        )
        for label, (wall, cpu) in times.items()
    ]


def _page_paths(name: str) -> dict[str, str]:
    return {
        f"{RESPONSES:,} responses in one tree": f"/conversations/{name}",
        f"a list of {CONVERSATIONS:,} conversations": "/",
    }


_AFTER_PAINT_JS = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
    done(performance.now()))))"""


def _measure_paint(tab: "Page", url: str) -> tuple[float, float]:
    """Milliseconds until two frames after the page was loaded, and those of CPU; the least of five."""
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    samples: list[tuple[float, float]] = []
    for _ in range(5):
        tab.goto("about:blank")
        before = _main_thread_seconds(session)
        tab.goto(url)
        wall = tab.evaluate(_AFTER_PAINT_JS)
        samples.append((wall, (_main_thread_seconds(session) - before) * 1e3))
    walls, cpus = zip(*samples, strict=True)
    return min(walls), min(cpus)


def _main_thread_seconds(session: "CDPSession") -> float:
    """Seconds that the main thread of the tab has worked so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(each["value"] for each in metrics if each["name"] == "TaskDuration")
