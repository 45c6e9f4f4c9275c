"""Compaction by threshold, by trigger and by endpoint, and the context afterwards."""

from typing import Any

import openresponses_types as spec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, NotFoundError, OpenAI

from kedge.server.coherence import EMPTY_COHERENCE, check_calls_answered
from kedge.server.encrypted_content import compact
from kedge.server.models import PracticeModel
from kedge.testing import TestServer, serve
from kedge.usage.tokens import count_items
from server.conftest import (
    CheckResponse,
    Connect,
    Scripted,
    ask,
    list_texts,
    rejects,
    user_message,
)

LONG_TEXT = "word " * 700
COMPACT: Any = [{"type": "compaction", "compact_threshold": 1000}]


def create_long_chain(client: OpenAI) -> str:
    """Create three long responses, and return the id of the last one."""
    previous = ask(client, LONG_TEXT).id
    for _ in range(2):
        previous = ask(client, LONG_TEXT, previous).id
    return previous


def test_context_above_the_threshold_is_compacted(
    client: OpenAI, server: TestServer, checked: CheckResponse
) -> None:
    """The compaction item precedes the answer, and the next context starts with it."""
    previous = create_long_chain(client)
    options: Any = {"previous_response_id": previous, "context_management": COMPACT}
    create = client.responses.with_raw_response.create
    body = checked(create(model="m", input="newest", **options))
    assert [item["type"] for item in body["output"]] == ["compaction", "message"]
    assert list_texts(server)[-1] == "newest"
    assert body["usage"]["input_tokens"] > 1500
    after = ask(client, "later", body["id"])
    assert after.usage.input_tokens < 1000
    assert list_texts(server)[-1] == "later"
    assert list_texts(server)[0].startswith("Earlier items of this conversation were compacted")


def test_compaction_survives_a_restart(tmp_path: Any, connect: Connect) -> None:
    """A context that begins with a compaction is loaded unchanged after a restart."""
    db = str(tmp_path / "server.db")
    with serve(db=db) as server:
        client = connect(server)
        response = ask(client, "newest", create_long_chain(client), context_management=COMPACT)
        ask(client, "later", response.id)
        warm = server.requests[-1].context
    with serve(db=db) as server:
        ask(connect(server), "later", response.id)
        cold = server.requests[-1].context
    assert warm is not None
    assert cold is not None
    assert cold[:-1] == warm[:-1]


def test_items_before_a_compaction_are_deleted_with_it(client: OpenAI, server: TestServer) -> None:
    """Deleting a compacted chain retains only the compaction item, which the children need."""
    first = ask(client, "a secret " + LONG_TEXT)
    second = ask(client, "more " + LONG_TEXT, first.id)
    compacted = ask(client, "newest", second.id, context_management=COMPACT)
    child = ask(client, "x", compacted.id)
    before = server.requests[-1].context or ()
    for response in (first, second, compacted):
        client.responses.delete(response.id)
    ask(client, "x", child.id)
    after = server.requests[-1].context or ()
    assert after[: len(before)] == before
    count = server.call(
        lambda s: s.nodes._execute("SELECT count(*) FROM kedge_server_nodes").fetchone()[0]
    )
    assert count == 3  # the nodes of the compaction, the child and the last response


def test_trigger_only_compacts(client: OpenAI, server: TestServer) -> None:
    """The response to a trigger is one compaction item and can be continued."""
    previous = create_long_chain(client)
    trigger: Any = {"type": "compaction_trigger"}
    response = ask(client, [trigger], previous)
    assert [item.type for item in response.output] == ["compaction"]
    ask(client, "later", response.id)
    assert list_texts(server)[-1] == "later"
    with pytest.raises(BadRequestError, match="last input item"):
        ask(client, [trigger, user_message("x")])


def test_compaction_is_streamed(client: OpenAI, check_event: Any) -> None:
    """A stream sends the compaction events before the answer."""
    previous = create_long_chain(client)
    events = list(ask(client, "newest", previous, stream=True, context_management=COMPACT))
    for event in events:
        check_event(event.model_dump(exclude_unset=True))
    assert [event.type.removeprefix("response.") for event in events[2:6]] == [
        "output_item.added",
        "compaction.compacting",
        "output_item.done",
        "output_item.added",
    ]
    assert events[5].output_index == 1


def test_the_endpoint_returns_one_item(server: TestServer) -> None:
    """The output of the endpoint starts a new chain; its id cannot be continued. Strict clients accept it."""
    strict: Any = {"_strict_response_validation": True}
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=0, **strict) as client:
        previous = create_long_chain(client)
        raw = client.responses.with_raw_response.compact(
            model="m", previous_response_id=previous, input=[user_message("newest")]
        )
        body = raw.http_response.json()
        spec.CompactResource.model_validate(body)
        assert [item["type"] for item in body["output"]] == ["compaction"]
        compacted = raw.parse()
        assert compacted.usage.input_tokens > 1500
        with rejects("previous_response_not_found"):
            ask(client, "x", compacted.id)
        with pytest.raises(NotFoundError):
            client.responses.retrieve(compacted.id)
        items = [item.model_dump(exclude_none=True) for item in compacted.output]
        response = ask(client, [*items, user_message("later")])
        assert response.usage.input_tokens < compacted.usage.input_tokens
        assert list_texts(server)[-2:] == ["newest", "later"]
        with pytest.raises(BadRequestError, match="must be provided"):
            client.responses.compact(model="m")


def test_content_that_is_no_compaction_is_rejected(scripted: Scripted, connect: Connect) -> None:
    """Encrypted content of a compaction item is rejected if it was modified, or is that of reasoning."""
    with serve(model=scripted({"think": "Hm.", "say": "Done."})) as server:
        client = connect(server)
        response = ask(client, "x", include=["reasoning.encrypted_content"], store=False)
        compacted: Any = client.responses.compact(model="m", input="x").output[-1]
        modified = compacted.encrypted_content[:-8] + "AAAAAAA="
        for content in (modified, response.output[0].encrypted_content):
            item = {"type": "compaction", "encrypted_content": content}
            with rejects("invalid_encrypted_content", "could not be verified"):
                ask(client, [item, user_message("y")])


def test_compacted_conversation_lists_all_items(client: OpenAI, server: TestServer) -> None:
    """The model's context starts at the compaction; the conversation still lists every item."""
    conversation = client.conversations.create(
        items=[user_message(LONG_TEXT), user_message(LONG_TEXT)]
    )
    response = ask(client, "newest", conversation=conversation.id, context_management=COMPACT)
    ask(client, "later", conversation=conversation.id)
    assert LONG_TEXT not in list_texts(server)[1:]
    client.responses.delete(response.id)
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.type for item in items][:4] == ["message"] * 3 + ["compaction"]
    assert len(items) == 7


# Selection of the retained items.


def call_pair(number: int) -> list[dict[str, Any]]:
    id_ = f"call_{number}"
    return [
        {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": id_, "output": f"result {number} " * 20},
    ]


def reasoning_item(number: int) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{number}", "summary": []}


def message_item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


exchanges = st.lists(
    st.one_of(
        st.builds(
            message_item, st.sampled_from(["user", "assistant", "developer"]), st.just("word " * 60)
        ),
        st.builds(message_item, st.sampled_from(["user", "assistant"]), st.just("short")),
        st.sampled_from(["call", "thought"]),
    ),
    max_size=15,
)


@given(exchanges, st.integers(0, 600))
def test_compaction_never_separates_a_call_from_its_result(parts: list[Any], maximum: int) -> None:
    """The retained items are coherent and contain the last item and the last user message."""
    items: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        match part:
            case "call":
                items += call_pair(number)
            case "thought":
                items += [reasoning_item(number), message_item("assistant", f"thought {number}")]
            case _:
                items.append(part)
    compacted = compact(items, maximum).items
    open_calls, orphan = EMPTY_COHERENCE.track_calls(compacted)
    check_calls_answered(open_calls)
    assert orphan is None
    assert compacted[-1:] == items[-1:]
    questions = [item for item in items if item.get("role") == "user"]
    assert questions[-1:] == [item for item in compacted if item.get("role") == "user"][-1:]
    for index, item in enumerate(compacted):
        if item.get("role") == "assistant" and "thought" in str(item["content"]):
            assert compacted[index - 1]["type"] == "reasoning"


def test_the_first_and_the_newest_items_have_priority() -> None:
    """The first message usually states the topic, also of one long exchange with tools."""
    calls = [item for number in range(50) for item in call_pair(number)]
    loop = [message_item("user", "go"), *calls]
    compacted = compact(loop, 500).items
    assert (compacted[1], compacted[-2:]) == (loop[0], loop[-2:])
    assert count_items(compacted) < 700
    messages = [message_item("user", f"number {n} " + "word " * 20) for n in range(50)]
    assert count_items(compact([*messages, *loop], 500).items) < 700
    compacted = compact(messages, 300).items
    assert messages[0] in compacted
    assert messages[-1] is compacted[-1]
    assert len(compacted) < 20


def test_default_threshold_is_the_window(connect: Connect) -> None:
    """Without ``compact_threshold``, the context window is the threshold; nothing is compacted below it."""
    with serve(model=PracticeModel(window=1800)) as server:
        client = connect(server)
        previous = None
        for text, types in (("a ", []), ("b ", []), ("c ", ["compaction"])):
            options = {"context_management": [{"type": "compaction"}]}
            response = ask(client, text + LONG_TEXT, previous, **options)
            previous = response.id
            assert [item.type for item in response.output] == [*types, "message"]
