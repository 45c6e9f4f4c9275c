"""Pages are rendered in threads: other users are answered while one page is rendered."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from markupsafe import Markup

from kedge.turns import Block
from kedge.web import page_templates as markdown
from kedge.web import plan_card, service
from kedge.workflows import refine
from web.conftest import TIMEOUT, PageServer


class HeldWork:
    """A function that waits in its thread until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def wait(self) -> None:
        """Report the start of the work, and wait."""
        self.entered.set()
        assert self.released.wait(TIMEOUT)


def check_others_are_answered(page: PageServer, path: str, held: HeldWork) -> str:
    """Request a page whose rendering is held, another one meanwhile, and return the first page."""
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(partial(page.client.get, path))
        try:
            assert held.entered.wait(TIMEOUT)
            assert page.client.get("/dashboard").status_code == 200
            assert page.client.get("/api/conversations").status_code == 200
            assert not slow.done()
        finally:
            held.released.set()
        return slow.result(TIMEOUT).text


async def refine_cell(service: service.ConversationService) -> str:
    result = await refine(
        "Say **held cell**", judge=lambda _: True, engine=service.models.engine, store=service.store
    )
    return result.workflow


@pytest.mark.parametrize("kind", ["conversation", "workflow"])
def test_markdown_is_rendered_in_a_thread(
    page: PageServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """While the Markdown of a conversation or of the cells of a workflow is rendered, others are answered."""
    is_workflow = kind == "workflow"
    name = page.run(refine_cell) if is_workflow else page.create_conversation("Say **held**.")
    held, render = HeldWork(), markdown._render

    def wait_and_render(text: str) -> Markup:
        held.wait()
        return render(text)

    monkeypatch.setattr(markdown, "_render", wait_and_render)
    html = check_others_are_answered(page, f"/{kind}s/{name}", held)
    assert f"<strong>held{' cell' * is_workflow}</strong>" in html


def test_comparison_is_in_a_thread(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While two branches are compared, other requests are answered."""
    name = page.create_conversation("a", "b")
    held = HeldWork()

    def wait_and_build(
        left: tuple[Block, ...], right: tuple[Block, ...]
    ) -> tuple[tuple[plan_card.DiffRow, ...], int]:
        held.wait()
        return plan_card.build_diff(left, right)

    monkeypatch.setattr(service, "build_diff", wait_and_build)
    path = f"/conversations/{name}/compare"
    assert "<h1>" in check_others_are_answered(page, path, held)
