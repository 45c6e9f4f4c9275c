"""Test dry runs of conversations."""

from msgspec.structs import replace

from kedge.conversation import Conversation
from kedge.providers import connect
from kedge.store import open_store
from kedge.testing import serve


async def test_a_plan_finds_the_responses_of_the_store() -> None:
    """A copy of a conversation is chained on the response of the other, and its plans say so."""
    with serve() as server:
        engine = connect(f"responses:{server.base_url}#practice")
        async with engine, open_store("sqlite://:memory:") as store:
            first = await Conversation.create(engine, store=store)
            await first.send("Hello")
            copied = [
                replace(block, id="", metadata={}, source=None) for block in first.turn.blocks
            ]
            second = await Conversation.create(engine, store=store, blocks=copied)
            assert second.plan("And?").conditional
            plan = await second.probe_and_plan("And?")
            assert not plan.conditional
            reply = await second.send("And?")
            assert reply.plan
            assert plan.previous_response_id == reply.plan.previous_response_id != ""
