"""Tests that the page names the conversation object of a conversation, and deletes it with the conversation."""

import httpx2
import pytest

from kedge.web.service import ConversationService
from server.waiting import wait_until
from web.conftest import PageServer


def create_in_object(page: PageServer) -> tuple[str, str]:
    """Create a conversation in a conversation object; return the ids of both."""
    name = page.create_conversation("Hello", mode="conversation")

    async def find(service: ConversationService) -> str:
        row = await service.store.conversation(name)
        return (await service.store.load(row)).state.conversation_id

    return name, page.run(find)


def has_object(page: PageServer, object_id: str) -> bool:
    """Return whether the server of the page has a conversation object."""
    return page.client.get(f"/v1/conversations/{object_id}").status_code == httpx2.codes.OK


def test_the_page_names_the_object(page: PageServer) -> None:
    """The head of the page and the plan card have the id of the object; other conversations have none."""
    conversation, object_id = create_in_object(page)
    text = page.client.get(f"/conversations/{conversation}").text
    label = '<span title="The conversation object on the server">'
    assert f"{label}{object_id}</span>" in text
    other = page.create_conversation("Hello")
    assert label not in page.client.get(f"/conversations/{other}").text


@pytest.mark.parametrize("undo", [None, 1])
def test_a_deletion_includes_the_object(page: PageServer, undo: int | None) -> None:
    """The object is deleted at once, or when the time for undo is over; that of another one is not."""
    conversation, object_id = create_in_object(page)
    _, other = create_in_object(page)
    assert has_object(page, object_id)
    path = f"/api/conversations/{conversation}"
    assert page.client.delete(path, params={"undo": undo} if undo else {}).status_code == 204
    if undo:
        wait_until(lambda: not has_object(page, object_id))
    assert not has_object(page, object_id)
    assert page.client.delete(path).status_code == 404
    assert has_object(page, other)
