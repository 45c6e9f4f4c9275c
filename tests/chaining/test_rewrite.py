"""Tests of the parsing of requests to blocks, and of splitting their JSON into the text of its members."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from for_each import for_each
from kedge.chaining import IndexedResponse, MemoryIndex, rewrite
from kedge.chaining.rewrite import (
    ParsedRequest,
    index_response,
    join_object,
    normalize_json,
    parse_request,
    split_array,
    split_object,
)
from kedge.events import Outcome
from kedge.planning.digests import canonical_json
from kedge.turns import Turn, block_from_item
from planning.reference_digests import naive_digests
from strategies import json_values

LONG = "a text that makes the request long enough to be remembered " * 40
contents = st.sampled_from(["", "Hi", "é😀", LONG])
arguments = st.sampled_from(["{}", '{"a": 1}'])


def ask(text: str, **members: Any) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text, **members}


def answer(item_id: str, text: str) -> dict[str, Any]:
    """Return a message of the model."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": item_id, "content": content}


def call(text: str) -> dict[str, Any]:
    """Return a call with these arguments."""
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}


items = st.one_of(
    st.builds(ask, contents),
    st.builds(answer, st.sampled_from(["msg_1", "msg_2"]), contents),
    st.just({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}),
    st.builds(call, arguments),
    st.builds(
        lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, arguments
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Return bodies that resend a history, with items added, changed and removed."""
    history: list[Any] = [ask(LONG)]
    bodies: list[bytes] = []
    indent = draw(st.sampled_from([None, 1]))
    for _ in range(draw(st.integers(2, 6))):
        start = draw(st.integers(1, len(history)))
        stop = draw(st.sampled_from([start, len(history)]))
        history = [*history[:start], *draw(st.lists(items, max_size=3)), *history[stop:]]
        body = {"model": "m", "input": history, "stream": draw(st.booleans())}
        bodies.append(json.dumps(body, indent=indent).encode())
    return bodies


def read(content: bytes) -> ParsedRequest:
    request = parse_request(content)
    assert request.blocks, request.blocked
    return request


def send(*history: dict[str, Any]) -> ParsedRequest:
    """Return a request with this history."""
    return read(json.dumps({"model": "m", "input": history}).encode())


def describe(request: ParsedRequest) -> tuple[Any, ...]:
    """Return all values that depend on the items of a request."""
    length = len(request.blocks)
    covered = request.prefixes.count(length)
    return (
        request.items,
        [(type(block), canonical_json(block)) for block in request.blocks],
        [request.prefixes.digest(count) for count in range(covered + 1)],
        [request.prefixes.end_position(count) for count in range(covered + 1)],
        request.blocked,
    )


@given(conversations())
def test_a_resent_request_is_parsed_like_a_first_one(bodies: list[bytes]) -> None:
    """Items, blocks and digests depend on neither earlier nor later requests."""
    together = [read(body) for body in bodies]
    for body, request in zip(bodies, together, strict=True):
        rewrite._recent_inputs.clear()
        assert describe(request) == describe(read(body))
        assert [json.loads(text) for text in request.items] == json.loads(body)["input"]
        covered = request.prefixes.count(len(request.blocks))
        assert request.prefixes.digest(covered) == naive_digests(Turn(_rename(request)))[-1]


def _rename(request: ParsedRequest) -> list[Any]:
    """Return the blocks with unique ids, because equal blocks are the same object."""
    return [replace(block, id=f"blk_{number}") for number, block in enumerate(request.blocks)]


def test_an_invalid_body_with_a_known_prefix_is_rejected() -> None:
    """Known items are not read again, but the text is checked."""
    body = json.dumps({"model": "m", "input": [ask(LONG), ask("Hi")], "stream": False})
    end = body.index("]")
    truncated = [body[:length] for length in range(body.index("Hi"), len(body))]
    added = (",", ", ", ",,1", " 1", ",NaN", ",}")
    extended = [f"{body[:end]}{each}{body[end:]}" for each in added]
    for text in (*truncated, *extended, f"{body}]", body.replace("false", "NaN")):
        read(body.encode())
        assert parse_request(text.encode()).blocked == "not_json", text[end - 20 :]
    new = ask("New")
    reread = read(f"{body[:end]} , {json.dumps(new)}{body[end:]}".encode())
    assert json.loads(reread.items[-1]) == new
    assert len(reread.items) == len(reread.blocks) == 3


def test_a_request_with_too_many_items_or_values_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is sent as the program wrote it, without a block for each item."""
    item = '{"role":"user","content":"x"}'
    most = parse_request(f'{{"input":[{",".join([item] * 20_000)}]}}'.encode())
    assert (most.blocked, len(most.blocks)) == ("", 20_000)
    more = parse_request(f'{{"input":[{",".join([item] * 20_001)}]}}'.encode())
    assert (more.blocked, more.blocks) == ("too_large", ())
    monkeypatch.setattr(rewrite, "LARGE_BYTES", 100)
    monkeypatch.setattr(rewrite, "MAX_VALUES", 100)
    values = parse_request(f'{{"input":"x","metadata":[{",".join(["1"] * 100)}]}}'.encode())
    assert values.blocked == "too_large"


def test_recent_inputs_are_bounded() -> None:
    """The oldest inputs are dropped, and very short and very long ones are not stored."""
    rewrite._recent_inputs.clear()
    for number in range(rewrite.MAX_REPLAYS + 1):
        send(ask(f"{number} {LONG}"))
    send(ask("short"))
    send(ask("x" * (rewrite.MAX_REPLAY_BYTES + 1)))
    kept = [json.loads(key[0])["content"] for key in rewrite._recent_inputs]
    assert kept == [f"{number} {LONG}" for number in range(1, rewrite.MAX_REPLAYS + 1)]


CALL = {**call("{}"), "id": "fc_1", "namespace": "math", "caller": {"type": "direct"}}
MESSAGE = {**answer("msg_1", "Hi"), "phase": "final_answer"}
REASONING = {"type": "reasoning", "summary": []}
OUTPUT = [CALL, MESSAGE]
FIRST = ask("Hello", name="Ada")
RESULT = {"type": "function_call_output", "call_id": "c", "output": "42"}


def without(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


def find_anchor(request: ParsedRequest, index: MemoryIndex) -> str:
    """Return the anchor of a request, or the reason to send it in full."""
    decided = rewrite.rewrite(request, index, scope="s", now=2.0)
    return decided if isinstance(decided, str) else decided.anchor.record.response_id


def add_response(
    index: MemoryIndex, request: ParsedRequest, response_id: str, *output: Any, **options: Any
) -> IndexedResponse:
    """Add a response to this request with this output, and return its entry."""
    blocks = tuple(map(block_from_item, output))
    outcome = Outcome("completed", blocks=blocks, response_id=response_id)
    entry = index_response(request, outcome, scope="s", now=1.0, **options)
    assert entry is not None
    index.add("s", entry)
    return entry


def continue_response(replayed: list[dict[str, Any]], first: dict[str, Any] = FIRST) -> str:
    """Return the anchor of a replay of a response with ``OUTPUT``, or the reason to send it in full."""
    index = MemoryIndex()
    add_response(index, send(FIRST), "resp_1", *OUTPUT)
    return find_anchor(send(first, *replayed, RESULT), index)


@for_each(
    ("replayed", "anchor"),
    [
        # A program need not repeat members such as `phase` and `namespace`, all of them or some.
        (OUTPUT, "resp_1"),
        ([CALL, without(MESSAGE, "phase", "id")], "resp_1"),
        ([without(CALL, "namespace"), MESSAGE], "resp_1"),
        ([without(CALL, "namespace", "caller"), without(MESSAGE, "phase")], "resp_1"),
        ([CALL, {**MESSAGE, "phase": None}], "resp_1"),
        # A member with another value, or one that the output had not, is a difference.
        ([CALL, {**MESSAGE, "phase": "commentary"}], "no_anchor"),
        ([{**CALL, "namespace": "text"}, without(MESSAGE, "phase")], "no_anchor"),
        ([{**CALL, "caller": {"type": "program", "caller_id": "x"}}, MESSAGE], "no_anchor"),
        ([CALL, {**MESSAGE, "namespace": "math"}], "no_anchor"),
    ],
)
def test_members_of_the_output_are_compared(replayed: list[Any], anchor: str) -> None:
    """A replay may lack members of the output, but not contradict them; members of the input are content."""
    assert continue_response(replayed) == anchor
    assert continue_response(replayed, ask("Hello")) == "no_anchor"
    assert continue_response(replayed, ask("Hello", name="Bob")) == "no_anchor"


def test_reasoning_of_the_anchor_is_not_sent_again() -> None:
    """Reasoning after the last covered item of a response is on the server, and would be rejected as a duplicate."""
    index = MemoryIndex()
    output = [answer("msg_1", "Hi"), {**REASONING, "id": "rs_1"}]
    add_response(index, send(FIRST), "resp_1", *output)
    request = send(FIRST, *output, {**REASONING, "id": "rs_2"}, ask("And?"))
    decided = rewrite.rewrite(request, index, scope="s", now=2.0)
    assert not isinstance(decided, str)
    assert [block.kind for block in decided.sent] == ["reasoning", "user"]


def test_a_client_chains_only_on_a_complete_response() -> None:
    """A response on one that is not known to be complete is not indexed; others expire with the first."""
    parent = add_response(MemoryIndex(), send(FIRST), "resp_1", MESSAGE)
    body = {"model": "m", "input": [ask("And?")], "previous_response_id": "resp_1"}
    request = read(json.dumps(body).encode())
    values = {"scope": "s", "now": 5.0}
    outcome = Outcome("completed", blocks=(block_from_item(MESSAGE),), response_id="resp_2")
    entry = index_response(request, outcome, parent=parent, **values)
    assert entry is not None
    assert (entry.record.root_created_at, entry.record.created_at) == (1.0, 5.0)
    running = replace(parent, record=replace(parent.record, status="running"))
    assert index_response(request, outcome, parent=running, **values) is None


@for_each(
    ("changes", "members", "status"),
    [
        ({}, {}, "completed"),
        ({"anchor_problem": "no_id"}, {}, None),
        ({"stored": False}, {}, None),
        ({"blocks": ()}, {}, None),
        ({"blocks": (block_from_item({"type": "compaction", "id": "cmp_1"}),)}, {}, None),
        ({"response_id": ""}, {}, None),
        ({"status": "running", "blocks": ()}, {}, "incomplete"),
        ({"status": "cut"}, {}, None),
        ({"status": "cut"}, {"background": True}, "incomplete"),
        ({"status": "cut", "response_id": ""}, {"background": True}, None),
    ],
)
def test_a_response_is_indexed_if_its_context_is_known(
    changes: dict[str, Any], members: dict[str, Any], status: str | None
) -> None:
    """One that is still generated in the background is completed later, by the response with its id."""
    request = read(json.dumps({"model": "m", "input": [FIRST], **members}).encode())
    outcome = Outcome("completed", blocks=(block_from_item(MESSAGE),), response_id="resp_1")
    changed = replace(outcome, **changes)
    entry = index_response(request, changed, scope="s", now=1.0, retention=None)
    assert (entry and entry.record.status) == status
    if entry and status == "incomplete":
        assert entry.record.expires_at is None
        assert rewrite.complete_response(entry, replace(outcome, response_id="resp_2")) is None
        done = rewrite.complete_response(entry, outcome)
        assert done == index_response(send(FIRST), outcome, scope="s", now=1.0, retention=None)


@for_each(("custom", "anchor"), [(False, "resp_1"), (True, "no_anchor")])
def test_free_text_of_a_call_is_compared_as_written(custom: bool, anchor: str) -> None:
    """Whitespace is a part of free text, also if it is JSON, but not of arguments."""
    kind, name = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
    sent, replayed = (
        {"type": kind, "call_id": "c", "name": "f", name: text} for text in ('{"a": 1}', '{"a":1}')
    )
    index = MemoryIndex()
    add_response(index, send(FIRST), "resp_1", sent)
    assert find_anchor(send(FIRST, replayed, ask("And?")), index) == anchor


def test_members_of_earlier_responses_are_compared() -> None:
    """The entry of a chained response contains the members of the whole context, sent or remembered."""
    index = MemoryIndex()
    parent = None
    history: list[Any] = [FIRST]
    for number in (1, 2):
        output = {**MESSAGE, "phase": f"phase {number}"}
        parent = add_response(index, send(*history), f"resp_{number}", output, parent=parent)
        history += [without(output, "phase"), ask("?")]
    for phase, expected in (("phase 1", "resp_2"), ("phase 2", "no_anchor")):
        history[1] = {**history[1], "phase": phase}
        assert find_anchor(send(*history), index) == expected


objects = st.dictionaries(st.text(), json_values(), max_size=6)
indents = st.sampled_from([None, 1, 4])


@given(objects, st.lists(json_values(), max_size=5), indents, st.booleans())
def test_members_are_those_of_json_loads(
    members: dict[str, Any], items: list[Any], indent: int | None, ascii_only: bool
) -> None:
    """Each text has the value of its member or element, and the order is that of the object."""
    body = {**members, "input": items}
    text = json.dumps(body, indent=indent, ensure_ascii=ascii_only)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # a lone surrogate outside of an escape cannot be encoded
        return
    found = split_object(content)
    assert list(found) == list(json.loads(text))
    assert {name: json.loads(value) for name, value in found.items()} == json.loads(text)
    assert all(value in content for value in found.values())
    assert [json.loads(value) for value in split_array(found["input"])] == items


@for_each(
    "element",
    [
        *(r'"\ud83d"', r'"\uDE00\ud83d"', r'"\ud83d\ude00"', r'"\\ud83d"'),
        *("1e400", "-0", "[[], {}]", r'{"\"a\ud800": "]}"}'),
    ],
)
def test_surrogates_and_unusual_numbers_are_copied(element: str) -> None:
    """Half of a surrogate pair, a large number and every escape are returned as they are written."""
    text = f'{{ "a\\ud800":{element},"input":[{element} , {element}]\n}}'
    members = split_object(text.encode())
    assert members == {"a\ud800": element.encode(), "input": members["input"]}
    assert split_array(members["input"]) == (element.encode(), element.encode())
    assert split_object(join_object(members)) == members


@for_each(
    "text",
    [
        *("", "[]", "{", '{"a":1', '{"a":1}x', '{"a":NaN}', '{"a" 1}', "{,}", "{1:2}", "null"),
        *('{"a":1,"a":2}', '{"a":1,"a":1}', '{"a":12,"a":1}', '{"a":1,"b":1,"a":1}'),
        *('{"a":1,"a":1,"b":1}', '{"a":{},"\\u0061":{}}', '{"a":"x","a":"x,"}'),
    ],
)
def test_text_that_is_not_one_object_is_rejected(text: str) -> None:
    """Text that is not exactly one JSON object, or has a member twice, raises a ``ValueError``."""
    with pytest.raises(ValueError, match=r"."):
        split_object(text.encode())


@for_each("content", [b'{"a":"\xff"}', b'{"\xff":1}', b"\xef\xbb\xbf{}"])
def test_only_utf_8_is_accepted(content: bytes) -> None:
    """Other bytes, also inside of values, and a byte order mark raise a ``ValueError``."""
    with pytest.raises(ValueError, match=r"."):
        split_object(content)


@for_each(
    ("one", "other", "equal"),
    [
        ('{"x": 2}', '{"x":2}', True),
        ('{"x":"é"}', '{"x":"\\u00e9"}', True),
        ('{"a":1,"b":2}', '{"b":2,"a":1}', False),
        ('{"x":1}', '{"x":1.0}', False),
        ('{"x":12345678901234567890123}', '{"x": 12345678901234567890123}', True),
        ('{"x":[1, {"y": null}]}', '{"x":[1,{"y":null}]}', True),
        ("not json", "not  json", False),
    ],
)
def test_arguments_are_equal_up_to_whitespace_and_escapes(
    one: str, other: str, equal: bool
) -> None:
    """A different key order or a different notation of a number makes arguments unequal."""
    assert (normalize_json(one) == normalize_json(other)) is equal
