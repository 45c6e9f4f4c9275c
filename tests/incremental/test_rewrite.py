"""Tests of the parsing of requests to blocks, which skips the items of an earlier request."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kedge.incremental import rewrite
from kedge.incremental.rewrite import ParsedRequest, parse_request
from kedge.planning.canonical import canonical_json
from kedge.turns import Turn
from planning.reference_digests import naive_digests

LONG = "a text that makes the request long enough to be remembered " * 40
contents = st.sampled_from(["", "Hi", "é😀", LONG])
items = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, contents),
    st.builds(
        lambda name, text: {
            "type": "message",
            "role": "assistant",
            "id": name,
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        },
        st.sampled_from(["msg_1", "msg_2"]),
        contents,
    ),
    st.just({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}),
    st.builds(
        lambda kind, text: (
            {"type": kind, "call_id": "c", "name": "f", "arguments": text}
            if kind == "function_call"
            else {"type": kind, "call_id": "c", "output": text}
        ),
        st.sampled_from(["function_call", "function_call_output"]),
        st.sampled_from(["{}", '{"a": 1}']),
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Return bodies that resend a history, with items added, changed and removed."""
    history: list[Any] = [{"role": "user", "content": LONG}]
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
    assert isinstance(request, ParsedRequest), request
    return request


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
        rewrite._recent_inputs = rewrite._RecentInputs()
        assert describe(request) == describe(read(body))
        spans = [request.scanned.text[span.start : span.end] for span in request.items]
        assert [json.loads(text) for text in spans] == json.loads(body)["input"]
        covered = request.prefixes.count(len(request.blocks))
        assert request.prefixes.digest(covered) == naive_digests(Turn(_rename(request)))[-1]


def _rename(request: ParsedRequest) -> list[Any]:
    """Return the blocks with unique ids, because equal blocks are the same object."""
    return [replace(block, id=f"blk_{number}") for number, block in enumerate(request.blocks)]


def test_an_item_with_a_known_prefix_is_parsed_again() -> None:
    """An item that begins like one of the earlier request is not mistaken for it."""
    padding = " " * rewrite.REPLAY_KEY_CHARS
    first = f'{{"model":"m",{padding}"input":[{{"role":"user","content":"Hi"}},1'
    assert parse_request(f"{first}]}}".encode()) == "input"
    recent = rewrite._RecentInputs()
    text = f"{padding}[10,20"
    start = len(padding)
    spans = (rewrite.Span(start + 1, start + 3), rewrite.Span(start + 4, start + 6))
    recent.put(rewrite._ReadInput(start, text, spans, (), rewrite.PrefixIndex()))
    for candidate, count in (("[10,20]", 2), ("[10,20 ,3]", 2), ("[10,200]", 1), ("[10,20", 1)):
        match = recent.find(padding + candidate)
        assert match is not None
        assert match.span == (start, spans[count - 1].end)
    assert recent.find(f"{padding}[11,20]") is None


def test_an_invalid_body_with_a_known_prefix_is_rejected() -> None:
    """Known items are not parsed again, but everything after them is."""
    history = [{"role": "user", "content": LONG}, {"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "m", "input": history, "stream": False})
    end = body.index("]")
    truncated = [body[:length] for length in range(body.index("Hi"), len(body))]
    extended = [
        f"{body[:end]}{added}{body[end:]}" for added in (",", ", ", ",,1", " 1", ",NaN", ",}")
    ]
    for text in (*truncated, *extended, f"{body}]", body.replace("false", "NaN")):
        read(body.encode())
        assert parse_request(text.encode()) == "not_json", text[end - 20 :]
    new = {"role": "user", "content": "New"}
    reread = read(f"{body[:end]} , {json.dumps(new)}{body[end:]}".encode())
    assert reread.scanned.get("input") == [new]
    assert len(reread.items) == len(reread.blocks) == 3


def test_recent_inputs_are_bounded() -> None:
    """The oldest inputs are dropped, and very short and very long ones are not stored."""
    recent = rewrite._RecentInputs()
    for number in range(rewrite.MAX_REPLAYS + 1):
        text = f"{number:08}" + " " * rewrite.REPLAY_KEY_CHARS
        recent.put(_read_input(text))
    recent.put(_read_input("short"))
    recent.put(_read_input("x" * (rewrite.MAX_REPLAY_CHARS + 1)))
    assert len(recent._entries) == rewrite.MAX_REPLAYS
    assert recent.find("00000000" + " " * rewrite.REPLAY_KEY_CHARS + "]") is None
    assert recent.find("00000001" + " " * rewrite.REPLAY_KEY_CHARS + "]") is not None


def _read_input(text: str) -> rewrite._ReadInput:
    """Return an input with one item that spans its complete text."""
    return rewrite._ReadInput(0, text, (rewrite.Span(0, len(text)),), (), rewrite.PrefixIndex())
