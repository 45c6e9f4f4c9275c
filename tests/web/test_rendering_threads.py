"""Pages are rendered in threads: other users are answered while one page is rendered."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from kedge.web import markdown, service
from kedge.workflows import refine
from web.conftest import TIMEOUT, PageServer


def check_others_are_answered(
    page: PageServer, path: str, patch: pytest.MonkeyPatch, module: object, name: str
) -> str:
    """Request a page while a function of its rendering waits, another one meanwhile, and return the first."""
    entered, released = threading.Event(), threading.Event()
    function = getattr(module, name)

    def wait_and_call(*arguments: Any) -> Any:
        entered.set()
        assert released.wait(TIMEOUT)
        return function(*arguments)

    patch.setattr(module, name, wait_and_call)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(partial(page.client.get, path))
        try:
            assert entered.wait(TIMEOUT)
            assert page.client.get("/dashboard").status_code == 200
            assert page.client.get("/api/conversations").status_code == 200
            assert not slow.done()
        finally:
            released.set()
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
    path = f"/{kind}s/{name}"
    html = check_others_are_answered(page, path, monkeypatch, markdown, "_render")
    assert f"<strong>held{' cell' * is_workflow}</strong>" in html


def test_comparison_is_in_a_thread(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While two branches are compared, other requests are answered."""
    path = f"/conversations/{page.create_conversation('a', 'b')}/compare"
    assert "<h1>" in check_others_are_answered(page, path, monkeypatch, service, "build_diff")
