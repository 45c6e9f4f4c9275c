"""Known mistakes of clients that use stored responses, each tested with real requests.

Every test sends requests through the real client to the strict local server, and checks what was sent and
what the model received. The law: the context of the model equals the Turn.
"""

import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from engines import runs
from engines.conftest import open_engine
from engines.runs import check_law, collect_events, last_text, request_bodies, send_lines
from kedge import turns
from kedge.engines import ResponsesEngine
from kedge.errors import StreamCut, Unsendable
from kedge.middleware import guard, redact, repair, system_prompt, tools, two_phase, with_middleware
from kedge.planning import get_state, set_state
from kedge.testing import TestServer, serve
from kedge.turns import ReasoningBlock, ToolCallBlock, Turn, assistant, dumps, tool_result, user
from normalization import normalize_blocks, normalize_items


def user_texts(server: TestServer) -> list[str]:
    """Return the user messages of the newest context (the practice model often repeats them)."""
    return [str(each) for each in normalize_items(server.requests[-1].context) if each[0] == "user"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def lookup(city: str) -> str:
    """Tell the weather in a city."""
    return f"It rains in {city}."


async def test_01_edited_user_message_before_the_anchor_reaches_the_server(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The old text of an edited message is in no later context."""
    turn = await send_lines(engine, "My password is hunter2.", "Two")
    turn = turn.edit(turn.blocks[0].id, user("My password is secret."))
    turn = await engine.run(turn.append(user("What did I say first?")))
    check_law(server, turn)
    assert not any("hunter2" in text for text in user_texts(server))


async def test_02_edited_answer_is_sent(engine: ResponsesEngine, server: TestServer) -> None:
    """The model receives its answer as it was edited."""
    turn = await send_lines(engine, "One")
    turn = turn.edit(turn.blocks[1].id, assistant("I said something else."))
    turn = await engine.run(turn.append(user("Two")))
    check_law(server, turn)
    assert "I said something else." in str(server.requests[-1].context)


async def test_03_edit_near_the_end_uses_the_earlier_anchor(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Only blocks after the last unchanged response are sent again."""
    turn = await send_lines(engine, *(f"Line {n}" for n in range(6)))
    turn = turn.edit(turn.blocks[-2].id, user("Line five")).append(user("Next"))
    turn = await engine.run(turn)
    assert request_bodies(server)[-1]["previous_response_id"] == turn.blocks[9].response_id
    check_law(server, turn)


async def test_04_equal_rebuild_uses_the_chain(engine: ResponsesEngine, server: TestServer) -> None:
    """A Turn rebuilt with new ids and metadata and a JSON round trip is still chained."""
    turn = await send_lines(engine, "One", "Two")
    rebuilt = [replace(b, id="", metadata={"rebuilt": True}, source=None) for b in turn.blocks]
    turn = turns.loads(dumps(set_state(Turn(rebuilt), get_state(turn))))
    turn = await engine.run(turn.append(user("Three")))
    assert len(request_bodies(server)[-1]["input"]) == 1
    check_law(server, turn)


async def test_05_summary_reaches_the_server_and_old_blocks_do_not(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A local summary is sent once, and the server's context is the shortened one."""
    turn = await send_lines(engine, "One", "Two", "Three")
    short = Turn([user("Summary: we counted."), *turn.blocks[4:]], data=turn.data)
    turn = await engine.run(short.append(user("Four")))
    check_law(server, turn)
    assert len(server.requests[-1].context or ()) == 4
    turn = await engine.run(turn.append(user("Five")))
    assert "Summary" not in str(request_bodies(server)[-1]["input"])
    check_law(server, turn)


async def test_06_changed_system_prompt_is_sent(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Instructions are sent with every request, and changing them does not break the chain."""
    texts = iter(["Be kind.", "Be terse."])
    with_prompt = with_middleware(engine, system_prompt(lambda _: next(texts)))
    turn = await with_prompt.run(Turn([user("One")]))
    turn = await with_prompt.run(turn.append(user("Two")))
    assert [body["instructions"] for body in request_bodies(server)] == ["Be kind.", "Be terse."]
    assert request_bodies(server)[-1]["previous_response_id"]
    check_law(server, turn)


async def test_07_removed_tool_result_is_reported_and_can_be_repaired(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A tool call without a result raises an error before sending, unless it is repaired."""
    turn = await with_middleware(engine, tools(add)).run(
        Turn([user("Please call add with a=2 and b=3")])
    )
    result = next(block for block in turn.blocks if block.kind == "tool_result")
    broken = turn.remove(result.id).append(user("Go on"))
    with pytest.raises(Unsendable, match="has no result"):
        await engine.run(broken)
    turn = await with_middleware(engine, repair()).run(broken)
    check_law(server, turn)


async def test_08_expired_id_is_healed_by_a_full_send(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """An expired response id is healed by sending the complete history."""
    turn = await send_lines(engine, "One")
    server.clock.advance(days=31)
    turn = await engine.run(turn.append(user("What did I say first?")))
    assert "One" in last_text(turn)
    check_law(server, turn)


async def test_09_unstored_response_is_not_chained_on(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """After ``store=false`` the next request is sent in full."""
    turn = await send_lines(engine, "One", store=False)
    turn = await send_lines(engine, "Two", turn=turn)
    assert "previous_response_id" not in request_bodies(server)[-1]
    check_law(server, turn)


async def test_10_cancelled_stream_is_not_an_anchor(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A partial answer is neither in the Turn nor on the chain."""
    turn = await send_lines(engine, "One")
    next_turn = turn.append(user("Write 300 words."))
    async with engine.stream(next_turn) as stream:
        await runs.read_until(stream)
    turn = await engine.run(next_turn.append(user("Never mind.")))
    assert request_bodies(server)[-1]["previous_response_id"] == next_turn.blocks[1].response_id
    check_law(server, turn)


async def test_11_history_is_never_both_replayed_and_chained(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A chained request contains no blocks that its anchor already includes."""
    turn = await send_lines(engine, "One", "Two", "Three")
    expected = normalize_blocks(turn.blocks[:4])
    items = normalize_items(request_bodies(server)[-1]["input"])
    assert not set(items) & set(expected)
    check_law(server, turn)


async def test_12_each_step_of_a_tool_loop_moves_the_anchor(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """The second request chains on the first answer, including its reasoning, and sends the result."""
    with_tools = with_middleware(engine, tools(add))
    turn = await with_tools.run(Turn([user("Think, then call add with a=2 and b=3")]))
    first, second = request_bodies(server)
    assert "previous_response_id" not in first
    assert [item["type"] for item in second["input"]] == ["function_call_output"]
    assert any(item["type"] == "reasoning" for item in server.requests[-1].context or ())
    check_law(server, turn)


async def test_13_reasoning_without_an_answer_is_omitted(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Reasoning is sent only before the item it belongs to, so reasoning without one is omitted."""
    turn = await send_lines(engine, "Think about one.", mode="stateless")
    truncated = Turn(turn.blocks[:2], data=turn.data)
    assert isinstance(truncated.blocks[-1], ReasoningBlock)
    turn = await engine.run(truncated.append(user("Two")), mode="stateless")
    assert all(item["type"] != "reasoning" for item in request_bodies(server)[-1]["input"])
    check_law(server, turn)


async def test_14_branches_are_independent(engine: ResponsesEngine, server: TestServer) -> None:
    """Forks of one Turn share only the history before the fork."""
    turn = await send_lines(engine, "Common")
    left = await engine.run(turn.append(user("Left")))
    check_law(server, left)
    right = await engine.run(turn.append(user("Right")))
    check_law(server, right)
    left = await engine.run(left.append(user("Again")))
    check_law(server, left)
    assert "Right" not in str(server.requests[-1].context)


async def test_15_nulls_in_provider_json_do_not_break_the_chain(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A block loaded from an item with nulls and a status is equal to the original."""
    from kedge.turns import block_from_item, item_from_block

    turn = await send_lines(engine, "One")
    items = [{**item_from_block(b), "status": "completed", "phase": None} for b in turn.blocks]
    rebuilt = set_state(Turn(map(block_from_item, items)), get_state(turn))
    turn = await engine.run(rebuilt.append(user("Two")))
    assert request_bodies(server)[-1]["previous_response_id"]
    check_law(server, turn)


async def test_16_local_ids_are_never_sent(engine: ResponsesEngine, server: TestServer) -> None:
    """No local id is in any request."""
    turn = await send_lines(engine, "Think about one.", "Two", mode="stateless")
    sent = str([request.raw for request in server.requests])
    assert all(block.id not in sent for block in turn.blocks)
    assert turn.id not in sent


async def test_17_recovery_does_not_depend_on_wording(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """An error with an unknown message is healed by its error code."""
    turn = await send_lines(engine, "One")
    server.forget()
    server.faults.set("not_found=code")
    turn, events = await collect_events(engine, turn.append(user("Two")))
    assert runs.list_reasons(events)
    check_law(server, turn)


async def test_18_reasoning_about_a_secret_is_not_sent_after_redaction(
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


async def test_19_results_match_their_calls(engine: ResponsesEngine, server: TestServer) -> None:
    """Tool calls are identified by `call_id`, never by item id, in streams and resent history."""
    with_tools = with_middleware(engine, tools(add, lookup))
    question = Turn([user("Please call add with a=2 and b=3 and call lookup with city=Oslo")])
    async with with_tools.stream(question) as stream:
        await stream.finish()
    calls = {b.call_id: b for b in stream.turn.blocks if isinstance(b, ToolCallBlock)}
    results = [b for b in stream.turn.blocks if b.kind == "tool_result"]
    assert len(calls) == len(results) == 2
    for result in results:
        assert result.content[0] in calls
    assert all(call.item_id != call.call_id for call in calls.values())
    check_law(server, stream.turn)


async def test_20_round_limit_leaves_no_open_call(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """At the limit of rounds every call has a result, and the conversation can continue."""
    with_tools = with_middleware(engine, tools(add, max_rounds=0))
    turn = await with_tools.run(Turn([user("Please call add with a=2 and b=3")]))
    check_law(server, turn)
    turn = await with_tools.run(turn.append(user("Hello")))
    check_law(server, turn)


async def test_21_response_id_is_never_sent_to_another_provider() -> None:
    """Another server receives the complete history, and the first one still chains later."""
    with serve() as first, serve() as second:
        async with open_engine(first) as here, open_engine(second) as there:
            turn = await send_lines(here, "One")
            turn = await send_lines(there, "Two", turn=turn)
            assert "previous_response_id" not in request_bodies(second)[-1]
            check_law(second, turn)
            turn = await send_lines(here, "Three", turn=turn)
            assert request_bodies(first)[-1]["previous_response_id"] == turn.blocks[1].response_id
            check_law(first, turn)


async def test_22_silently_lost_context_is_detected_before_output(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A successful answer without the stored context is discarded, and the request is sent in full."""
    turn = await send_lines(engine, "One")
    server.faults.set("forget_silently,echo=no")
    turn = await engine.run(turn.append(user("What did I say first?")))
    assert "One" in last_text(turn)
    check_law(server, turn)


async def test_23_calls_retain_their_order(engine: ResponsesEngine, server: TestServer) -> None:
    """Tool calls and their results have the order of the model's output."""
    with_tools = with_middleware(engine, tools(add, lookup))
    question = Turn([user("Please call lookup with city=Oslo and call add with a=2 and b=3")])
    turn = await with_tools.run(question)
    calls = [b for b in turn.blocks if isinstance(b, ToolCallBlock)]
    results = [b.content[0] for b in turn.blocks if b.kind == "tool_result"]
    assert [call.output_index for call in calls] == [0, 1]
    assert [call.call_id for call in calls] == results
    check_law(server, turn)


async def test_24_deleted_block_is_not_in_the_context(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """A block removed from the Turn is not in the model's context."""
    turn = await send_lines(engine, "Forget me.", "Two")
    turn = turn.remove(turn.blocks[0].id).append(user("What did I say first?"))
    turn = await engine.run(turn)
    assert not any("Forget me." in text for text in user_texts(server))
    check_law(server, turn)


def test_every_pitfall_has_a_test() -> None:
    """The tests are numbered from 1 to 24 without a gap."""
    names = re.findall(r"^async def test_(\d\d)_", Path(__file__).read_text(), re.MULTILINE)
    numbers = [int(name) for name in names]
    assert numbers == list(range(1, 25))


# Integration tests of complete request sequences.


async def test_flow_end_to_end_chained_request(engine: ResponsesEngine, server: TestServer) -> None:
    """The first request sends all blocks, the second only the tool result; answers have a response id."""
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    turn = await engine.run(Turn([user("Please call add.")]), tools=(tool,))
    call = turn.blocks[-1]
    assert isinstance(call, ToolCallBlock)
    turn = await engine.run(turn.append(tool_result(call.call_id, "5")), tools=(tool,))
    first, second = request_bodies(server)
    assert "previous_response_id" not in first
    assert second["previous_response_id"] == call.response_id
    assert [item["type"] for item in second["input"]] == ["function_call_output"]
    assert [bool(block.response_id) for block in turn.blocks] == [False, True, False, True]
    check_law(server, turn)


async def test_flow_fallback_to_stateless(
    engine: ResponsesEngine, server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Reordered blocks match no anchor: everything is sent, and the reason is logged."""

    def rearrange(turn: Turn) -> Turn:
        return Turn([*turn.blocks[1:3], turn.blocks[0], *turn.blocks[3:]], data=turn.data)

    turn = await send_lines(engine, "One", "Two")
    rearranged = with_middleware(engine, two_phase(rearrange))
    turn = await rearranged.run(turn.append(user("Three")))
    assert "previous_response_id" not in request_bodies(server)[-1]
    assert "no valid anchor (changed)" in caplog.text
    check_law(server, turn)


async def test_flow_multiple_middleware_iterations(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """Each round of a tool loop chains on the previous round and sends only its new blocks."""
    turn = Turn()
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    turn = await engine.run(turn.append(user("Please call add.")), tools=(tool,))
    for _ in range(2):
        call = turn.blocks[-1]
        assert isinstance(call, ToolCallBlock)
        next_turn = turn.append(tool_result(call.call_id, "5"), user("Please call add again."))
        turn = await engine.run(next_turn, tools=(tool,))
        assert request_bodies(server)[-1]["previous_response_id"] == call.response_id
        assert len(request_bodies(server)[-1]["input"]) == 2
        check_law(server, turn)


async def test_interrupted_stream_retains_the_turn(
    engine: ResponsesEngine, server: TestServer
) -> None:
    """An interrupted stream raises a typed error whose Turn can be sent again."""
    turn = await send_lines(engine, "One")
    server.faults.set("cut_after_events=4", times=1)
    with pytest.raises(StreamCut) as exc_info:
        async with engine.stream(turn.append(user("Write 50 words."))) as stream:
            await stream.finish()
    assert exc_info.value.turn is not None
    with anyio.fail_after(300):
        turn = await engine.run(exc_info.value.turn)
    check_law(server, turn)
