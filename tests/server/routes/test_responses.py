"""Creating responses, with the official client over a real socket."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from kedge.server.models import PracticeModel
from kedge.testing import TestServer, serve

CheckResponse = Callable[[Any], dict[str, Any]]

KEYS = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
}


Connect = Callable[[TestServer], OpenAI]


def context_texts(context: Any) -> list[str]:
    return [item["content"][0]["text"] for item in context]


def test_a_response_has_all_31_keys(client: OpenAI, checked: CheckResponse) -> None:
    """Both oracles accept the body, and every key of the resource is there."""
    body = checked(client.responses.with_raw_response.create(model="practice", input="hello"))
    assert len(KEYS) == 31
    assert set(KEYS) <= body.keys()
    assert body["usage"]["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}


def test_settings_are_echoed_as_they_were_sent(client: OpenAI, checked: CheckResponse) -> None:
    """What a request decides about itself can be read in its response."""
    sent: dict[str, Any] = {
        "instructions": "Be kind.",
        "max_output_tokens": 100,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "safety_identifier": "someone",
        "temperature": 0.5,
        "tool_choice": "none",
        "top_p": 0.25,
        "truncation": "auto",
    }
    create: Any = client.responses.with_raw_response.create
    raw = create(
        model="some-model",
        input="hello",
        tools=[TOOL],
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        service_tier="fast",
        **sent,
    )
    body = checked(raw)
    assert {key: body[key] for key in sent} == sent
    assert body["model"] == "some-model"
    assert body["tools"] == [{**TOOL, "description": None, "strict": True}]
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["text"]["format"]["schema"] == {"type": "object"}
    assert body["service_tier"] == "priority"


def test_null_means_the_default(http: httpx2.Client) -> None:
    """A setting that is sent as null shows as if it had been left out."""
    names = ("temperature", "top_p", "tools", "metadata", "store", "text", "truncation", "include")
    plain = http.post("/v1/responses", json={"model": "m", "input": "x"}).json()
    nulls = http.post(
        "/v1/responses", json={"model": "m", "input": "x", **dict.fromkeys(names)}
    ).json()
    same = {"id", "output", "created_at", "completed_at"}
    assert {k: v for k, v in nulls.items() if k not in same} == {
        k: v for k, v in plain.items() if k not in same
    }


def test_a_chained_response_sees_what_was_said_before(client: OpenAI, server: TestServer) -> None:
    """The context is the parent's input and output, and then the new input."""
    first = client.responses.create(model="practice", input="one")
    second = client.responses.create(model="practice", input="two", previous_response_id=first.id)
    client.responses.create(model="practice", input="three", previous_response_id=second.id)
    assert context_texts(server.requests[-1].context) == [
        "one",
        first.output_text,
        "two",
        second.output_text,
        "three",
    ]
    assert second.previous_response_id == first.id
    assert second.conversation is None


def test_two_children_of_one_parent_do_not_see_each_other(
    client: OpenAI, server: TestServer
) -> None:
    """A fork shares the past and nothing else."""
    parent = client.responses.create(model="practice", input="one")
    client.responses.create(model="practice", input="left", previous_response_id=parent.id)
    client.responses.create(model="practice", input="right", previous_response_id=parent.id)
    assert context_texts(server.requests[-1].context) == ["one", parent.output_text, "right"]


def test_nothing_but_items_is_carried_over(client: OpenAI, server: TestServer) -> None:
    """Instructions, tools and settings hold for one request."""
    first = client.responses.create(
        model="practice",
        input="one",
        instructions="Be kind.",
        tools=[TOOL],
        metadata={"a": "b"},
    )
    second = client.responses.create(model="practice", input="two", previous_response_id=first.id)
    assert second.instructions is None
    assert second.tools == []
    assert second.metadata == {}
    context = server.requests[-1].context
    assert context is not None
    assert "Be kind." not in str(context)


def test_usage_counts_the_whole_context(client: OpenAI) -> None:
    """Every earlier token counts as input again, and so do instructions and tools."""
    first = client.responses.create(model="practice", input="one")
    second = client.responses.create(model="practice", input="two", previous_response_id=first.id)
    more = client.responses.create(
        model="practice",
        input="two",
        previous_response_id=first.id,
        instructions="Be kind.",
        tools=[TOOL],
    )
    assert first.usage
    assert second.usage
    assert more.usage
    assert second.usage.input_tokens > first.usage.total_tokens
    assert more.usage.input_tokens > second.usage.input_tokens + 10


def test_cached_tokens_are_the_previous_prompt_in_steps(client: OpenAI) -> None:
    """From 1024 tokens on, the input of the previous response is a cached prefix, in steps of 128."""
    first = client.responses.create(model="practice", input="word " * 2000)
    second = client.responses.create(model="practice", input="two", previous_response_id=first.id)
    assert first.usage
    assert second.usage
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert first.usage.input_tokens_details.cache_write_tokens == first.usage.input_tokens
    details = second.usage.input_tokens_details
    assert details.cached_tokens == first.usage.input_tokens // 128 * 128
    assert details.cached_tokens + details.cache_write_tokens == second.usage.input_tokens


def test_empty_input_goes_on_from_a_valid_response(client: OpenAI) -> None:
    """``input: []`` is enough where there is something to go on from, and nowhere else."""
    first = client.responses.create(model="practice", input="one")
    assert client.responses.create(model="practice", input=[], previous_response_id=first.id).id
    with pytest.raises(BadRequestError, match="must be provided") as caught:
        client.responses.create(model="practice", input=[])
    assert caught.value.code == "missing_required_parameter"
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="practice", input=[], previous_response_id="resp_x")
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("id", ["resp_x", "resp_" + "0" * 32, "resp_0000000001" + "0" * 22])
def test_an_unknown_previous_response_is_refused(client: OpenAI, id: str) -> None:  # noqa: A002
    """The error names the id, whether or not the id could have been one of ours."""
    client.responses.create(model="practice", input="one")
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="practice", input="x", previous_response_id=id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert f"Previous response with id '{id}' not found." in str(caught.value)


def test_an_unstored_response_is_nowhere(client: OpenAI) -> None:
    """``store: false``: it can be neither continued nor retrieved."""
    first = client.responses.create(model="practice", input="one", store=False)
    assert first.model_extra is not None
    assert first.model_extra["store"] is False
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="practice", input="two", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(NotFoundError):
        client.responses.retrieve(first.id)


def test_a_call_must_be_answered_in_the_next_request(
    scripted: Callable[..., PracticeModel], checked: CheckResponse, connect: Connect
) -> None:
    """Pairing ranges over the whole chain: an open call blocks, its output opens the way."""
    model = scripted(
        {"after": "weather", "say": "Sunny."},
        {"when": "sky", "call": {"name": "weather", "arguments": {"city": "Oslo"}}},
    )
    with serve(model=model) as server:
        client = connect(server)
        asked = checked(client.responses.with_raw_response.create(model="m", input="sky?"))
        call_id = asked["output"][0]["call_id"]
        with pytest.raises(BadRequestError, match=f"No tool output found .* {call_id}"):
            client.responses.create(model="m", input="hm", previous_response_id=asked["id"])
        output: Any = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
        answer = client.responses.create(
            model="m", input=[output], previous_response_id=asked["id"]
        )
        assert answer.output_text == "Sunny."
        with pytest.raises(BadRequestError, match="No tool call found"):
            client.responses.create(model="m", input=[output], previous_response_id=answer.id)


def test_reasoning_is_sealed_when_asked_and_tampering_is_refused(
    scripted: Callable[..., PracticeModel], checked: CheckResponse, connect: Connect
) -> None:
    """A client can carry reasoning for the server, but not change it."""
    with serve(model=scripted({"think": "Let me see.", "say": "Done."})) as server:
        client = connect(server)
        plain = checked(client.responses.with_raw_response.create(model="m", input="x"))
        assert plain["output"][0] == {
            "id": plain["output"][0]["id"],
            "type": "reasoning",
            "summary": [],
        }
        assert plain["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        body = checked(
            client.responses.with_raw_response.create(
                model="m",
                input="x",
                store=False,
                include=["reasoning.encrypted_content"],
                reasoning={"summary": "auto"},
            )
        )
        thought, said = body["output"]
        assert thought["summary"] == [{"type": "summary_text", "text": "Let me see."}]
        replay: Any = [
            {"role": "user", "content": "x"},
            thought,
            said,
            {"role": "user", "content": "y"},
        ]
        assert client.responses.create(model="m", input=replay).output_text == "Done."
        sealed = thought["encrypted_content"]
        for changed in (sealed[:-5] + "AAAA=", "gAAAAAnonsense", sealed + "!", ""):
            replay[1] = {**thought, "encrypted_content": changed}
            with pytest.raises((BadRequestError, NotFoundError)) as caught:
                client.responses.create(model="m", input=replay)
            if changed:
                assert caught.value.code == "invalid_encrypted_content"


def test_sealed_content_of_another_server_is_refused(
    scripted: Callable[..., PracticeModel], connect: Connect
) -> None:
    """Each database has a key of its own."""
    model = scripted({"think": "Hm.", "say": "Done."})
    with serve(model=model) as one, serve(model=model) as other:
        ours = connect(one)
        theirs = connect(other)
        made = ours.responses.create(
            model="m", input="x", include=["reasoning.encrypted_content"], store=False
        )
        replay: Any = [item.model_dump(exclude_none=True) for item in made.output]
        with pytest.raises(BadRequestError) as caught:
            theirs.responses.create(model="m", input=replay)
        assert caught.value.code == "invalid_encrypted_content"


def test_an_item_can_be_referred_to_by_its_id(client: OpenAI, server: TestServer) -> None:
    """A reference stands for the stored item; one to nothing is refused with 404."""
    first = client.responses.create(model="practice", input="one")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="practice", input=[reference, {"role": "user", "content": "two"}])
    assert context_texts(server.requests[-1].context) == [first.output_text, "two"]
    client.responses.delete(first.id)
    with pytest.raises(NotFoundError, match="Items are not persisted"):
        client.responses.create(model="practice", input=[reference])


def test_the_answer_stops_at_max_output_tokens(client: OpenAI, checked: CheckResponse) -> None:
    """It is incomplete, says why, and can still be continued."""
    body = checked(
        client.responses.with_raw_response.create(
            model="practice", input="word " * 200, max_output_tokens=16
        )
    )
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    assert body["output"][0]["status"] == "incomplete"
    assert 0 < body["usage"]["output_tokens"] <= 20
    assert client.responses.create(model="practice", input="go on", previous_response_id=body["id"])


def test_a_call_that_was_cut_off_blocks_the_chain(
    scripted: Callable[..., PracticeModel], connect: Connect
) -> None:
    """An incomplete response with a dangling call cannot be continued as if nothing were."""
    long = {"text": "word " * 100}
    with serve(model=scripted({"call": {"name": "write", "arguments": long}})) as server:
        client = connect(server)
        cut = client.responses.create(model="m", input="x", max_output_tokens=16)
        assert cut.status == "incomplete"
        with pytest.raises(BadRequestError, match="No tool output found for function call"):
            client.responses.create(model="m", input="y", previous_response_id=cut.id)


def test_what_does_not_fit_the_window_is_refused_or_truncated(connect: Connect) -> None:
    """``truncation: auto`` drops the oldest exchanges, and never the newest."""
    with serve(model=PracticeModel(window=120)) as server:
        client = connect(server)
        previous: str | None = None
        for text in ("first word " * 10, "second word " * 10):
            made = client.responses.create(
                model="m", input=text, previous_response_id=previous, truncation="auto"
            )
            previous = made.id
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="m", input="third", previous_response_id=previous)
        assert caught.value.code == "context_length_exceeded"
        client.responses.create(
            model="m", input="third", previous_response_id=previous, truncation="auto"
        )
        seen = context_texts(server.requests[-1].context)
        assert seen[-1] == "third"
        assert not any(text.startswith("first") for text in seen)
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="m", input="far too long " * 90, truncation="auto")
        assert caught.value.code == "context_length_exceeded"


def test_what_the_server_cannot_do_is_refused(client: OpenAI) -> None:
    """What runs in the background and is not stored could never be asked for."""
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(model="practice", input="x", background=True, store=False)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "background")


def test_a_bad_request_costs_no_state(client: OpenAI, http: httpx2.Client) -> None:
    """Checks come in the documented order: the schema before the state."""
    answer = http.post(
        "/v1/responses",
        json={"model": "m", "input": "x", "stop": 1, "previous_response_id": "resp_x"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Unknown parameter: 'stop'. Did you mean 'store'?"
    both = http.post(
        "/v1/responses",
        json={
            "model": "m",
            "input": "x",
            "conversation": "conv_x",
            "previous_response_id": "resp_x",
        },
    )
    assert both.json()["error"]["code"] == "mutually_exclusive_parameters"


def test_input_items_are_the_whole_resolved_input(client: OpenAI) -> None:
    """The parent's input and output, then the new input, in pages."""
    first = client.responses.create(model="practice", input="one")
    second = client.responses.create(
        model="practice",
        input=[{"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
        previous_response_id=first.id,
    )
    page: Any = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].content[0].text == "three"
    assert page.has_more
    listed: Any = list(client.responses.input_items.list(second.id, order="asc", limit=3))
    said = [item.content[0].text for item in listed]
    assert said == ["one", first.output_text, "two", "three"]
    assert len({item.id for item in listed}) == 4
    with pytest.raises(NotFoundError):
        client.responses.input_items.list("resp_x")


def test_input_tokens_are_counted_without_asking(client: OpenAI, server: TestServer) -> None:
    """The count is what a response would have for its input."""
    first = client.responses.create(model="practice", input="one")
    asked: Any = {"model": "practice", "input": "two", "previous_response_id": first.id}
    asked |= {"instructions": "Be kind.", "tools": [TOOL]}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    made = client.responses.create(**asked)
    assert made.usage
    assert counted.input_tokens == made.usage.input_tokens
    assert client.responses.input_tokens.count().input_tokens == 0
    with pytest.raises(BadRequestError) as caught:
        client.responses.input_tokens.count(previous_response_id="resp_x")
    assert caught.value.code == "previous_response_not_found"


def test_an_answer_can_have_a_schema(client: OpenAI) -> None:
    """``text.format`` with a JSON schema: the answer is JSON that fits it."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    made = client.responses.create(
        model="practice",
        input="My name is Ada.",
        text={"format": {"type": "json_schema", "name": "person", "schema": schema}},
    )
    answer = json.loads(made.output_text)
    assert answer.keys() == {"name", "age"}
    assert isinstance(answer["age"], int)


def test_reasoning_counts_as_output(
    scripted: Callable[..., PracticeModel], connect: Connect
) -> None:
    """Shown or not."""
    with serve(model=scripted({"think": "word " * 50, "say": "Done."})) as server:
        made = connect(server).responses.create(model="m", input="x")
    assert made.usage
    assert made.usage.output_tokens_details.reasoning_tokens >= 50
    assert made.usage.output_tokens > made.usage.output_tokens_details.reasoning_tokens
