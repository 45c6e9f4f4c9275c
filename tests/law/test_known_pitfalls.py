"""Known mistakes of clients that use stored responses and that no random edit of the fuzzers causes.

Every test sends requests through the real client to the strict local server, and checks what was sent and
what the model received. The law: the context of the model equals the Turn.
"""

from engines.runs import check_law, request_bodies, send_lines
from kedge.engines import ResponsesEngine
from kedge.middleware import guard, redact, tools, with_middleware
from kedge.planning import get_state, set_state
from kedge.testing import TestServer
from kedge.turns import ReasoningBlock, ToolCallBlock, Turn, block_from_item, item_from_block, user
from middleware.scripted_engine import add


def lookup(city: str) -> str:
    """Tell the weather in a city."""
    return f"It rains in {city}."


async def test_a_step_of_a_tool_loop_sends_the_results_in_the_order_of_their_calls(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A streamed step chains on its calls, which `call_id` and never the item id identifies."""
    with_tools = with_middleware(engine, tools(add, lookup))
    question = "Think, then call lookup with city=Oslo and call add with a=2 and b=3"
    async with with_tools.stream(Turn([user(question)])) as stream:
        await stream.finish()
    calls = [b for b in stream.turn.blocks if isinstance(b, ToolCallBlock)]
    results = [b.content[0] for b in stream.turn.blocks if b.kind == "tool_result"]
    assert [call.output_index for call in calls] == [1, 2]
    assert [call.call_id for call in calls] == results
    assert all(call.item_id != call.call_id for call in calls)
    first, second = request_bodies(server)
    assert "previous_response_id" not in first
    assert [item["type"] for item in second["input"]] == ["function_call_output"] * 2
    assert any(item["type"] == "reasoning" for item in server.requests[-1].context or ())
    check_law(server, stream.turn)


async def test_nulls_in_provider_json_do_not_break_the_chain(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A block loaded from an item with nulls and a status is equal to the original."""
    turn = await send_lines(engine, "One")
    items = [{**item_from_block(b), "status": "completed", "phase": None} for b in turn.blocks]
    rebuilt = set_state(Turn(map(block_from_item, items)), get_state(turn))
    turn = await engine.run(rebuilt.append(user("Two")))
    assert request_bodies(server)[-1]["previous_response_id"]
    check_law(server, turn)


async def test_local_ids_are_never_sent(engine: ResponsesEngine, server: TestServer) -> None:
    """No local id is in any request."""
    turn = await send_lines(engine, "Think about one.", "Two", mode="stateless")
    sent = str([request.raw for request in server.requests])
    assert all(block.id not in sent for block in turn.blocks)
    assert turn.id not in sent


async def test_reasoning_about_a_secret_is_not_sent_after_redaction(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """After a secret is redacted, reasoning derived from it is not sent again."""
    turn = await send_lines(engine, "Think about the code 47#11.", mode="stateless")
    encrypted = next(b for b in turn.blocks if isinstance(b, ReasoningBlock)).encrypted_content
    assert encrypted
    guarded = with_middleware(engine, guard(redact(r"\d\d#\d\d", direction="both")))
    turn = await guarded.run(turn.append(user("Go on")), mode="stateless")
    assert encrypted not in str(request_bodies(server)[-1])
    assert "47#11" not in str(request_bodies(server)[-1])
    check_law(server, turn)
