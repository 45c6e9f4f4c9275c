"""Tests of the model that a conversation was last used with."""

import pytest

from kedge import Conversation
from kedge.conversation.lookup import find_recorded_model
from kedge.planning import Mode
from kedge.store import Store
from kedge.testing import TestServer


@pytest.mark.parametrize("mode", ["chained", "conversation", "stateless"])
async def test_the_model_is_found_in_the_newest_response(
    store: Store, kedge_server: TestServer, mode: Mode
) -> None:
    """A conversation of a server has the same model string in every mode, also in a conversation object."""
    model = f"responses:{kedge_server.base_url}#practice"
    async with Conversation(model, store=store, mode=mode) as conversation:
        await conversation.send("My name is Ada.")
        newest = (await store.responses(conversation.row))[-1]
        assert find_recorded_model(conversation.row, newest) == model
