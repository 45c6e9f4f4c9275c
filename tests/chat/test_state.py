"""Encoding and decoding of state bytes, and detection of damage."""

import gc
import hashlib
import json
import os
import random
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from chat.state_mutations import mutate
from for_each import for_each
from kedge.chat.state import (
    DISCARD_REASONS,
    ChatState,
    DiscardedState,
    RecentStates,
    StateMemory,
    as_bytes,
    decode_state,
    encode_state,
    has_valid_checksum,
    state_from_turn,
)
from kedge.planning import (
    AnchorRecord,
    ConversationState,
    TokenCounts,
    find_problems,
    get_state,
    plan_request,
    prefix_digest,
    record_response,
    set_state,
)
from kedge.turns import (
    Block,
    Source,
    SystemBlock,
    Turn,
    assistant,
    dump_block,
    dumps,
    image,
    opaque,
    reasoning,
    system,
    tool_call,
    tool_result,
    user,
)
from strategies import blocks, json_objects

MUTATION_COUNT = int(os.environ.get("KEDGE_MUTATIONS", "400"))
"""The number of mutations of state bytes; the campaign uses KEDGE_MUTATIONS=100000."""


def make_turn(exchanges: int = 3) -> Turn:
    """Return a Turn with tools, reasoning, anchors and data, as an engine returns it."""
    turn = Turn(data={"mine": {"of": [1, None, "é"]}})
    for i in range(exchanges):
        question = user(["Look at this: 漢字 \U0001f30a", image("https://kedge.example/a.png")])
        turn = turn.append(question, system("from now on, be brief"))
        call = tool_call("look", {"n": i}, call_id=f"call_{i}")
        turn = add_response(turn, reasoning("hm", encrypted_content="abc"), call, number=2 * i)
        turn = turn.append(tool_result(f"call_{i}", {"found": ["a", "b"]}))
        turn = add_response(turn, assistant(f'It is "{i}".\n'), number=2 * i + 1)
    return turn.append(opaque({"type": "web_search_call", "id": "ws_1", "new": {"field": 1.5}}))


def test_recent_states_are_limited() -> None:
    """Recent states are found by their bytes, and the oldest are removed first."""
    states = [state_from_turn(make_turn(count), "openai", 1) for count in (1, 2, 3)]
    encoded = [encode_state(state) for state in states]
    recent = RecentStates(len(encoded[1]) + len(encoded[2]))
    for data, state in zip(encoded, states, strict=True):
        recent.add(data, state)
        recent.add(data, state)
    assert [recent.find(data) for data in encoded] == [None, states[1], states[2]]
    assert recent.find(bytes(bytearray(encoded[2]))) is states[2]
    assert recent.find(encoded[2][:-1]) is None
    small = RecentStates(len(encoded[0]))
    small.add(encoded[0], states[0])
    small.add(encoded[1], states[1])  # larger than everything that may be retained
    assert [small.find(data) for data in encoded[:2]] == [states[0], None]


def test_decoded_state_gives_the_turn_of_the_state() -> None:
    """A decoded state gives the same Turn as the state of the Turn itself, which has its digests, after any change."""
    rng = random.Random(11)
    for _ in range(40):
        turn = Turn([system("be kind")] * rng.randrange(2))
        for number in range(rng.randrange(2, 14)):
            turn = change_turn(rng, turn, number)
            state = state_from_turn(turn, "openai", 0)
            decoded = decode_state(encode_state(state), "openai")
            assert isinstance(decoded, ChatState)
            assert decoded == state
            leading, following = (system("a"),) * rng.randrange(2), (user("more"),)
            sent, expected = state.turn(leading, following), decoded.turn(leading, following)
            assert json.loads(dumps(sent)) == json.loads(dumps(expected))
            assert prefix_digest(sent) == prefix_digest(expected)
            assert find_problems(sent) == find_problems(expected)


def change_turn(rng: random.Random, turn: Turn, number: int) -> Turn:
    """Return the Turn after one random change that can occur between two states."""
    match rng.randrange(7):
        case 0 if len(turn):
            return turn.remove(rng.choice(turn.blocks).id)
        case 1 if len(turn):
            return turn.edit(rng.choice(turn.blocks).id, user("changed"))
        case 2:  # the response of this block has no anchor
            source = Source(f"other_{number}", "x", 0)
            return turn.append(assistant("unrecorded", source=source))
        case 3:
            state = get_state(turn)
            return set_state(turn, state.mark_lost(r.response_id for r in state.anchors[1:2]))
        case 4:
            state = get_state(turn)
            return set_state(turn, structs.replace(state, anchors=state.anchors[1:]))
        case _:
            next_turn = turn.append(user(f"question {number}"))
            return add_response(next_turn, assistant("yes"), reasoning("hm"), number=number)


def test_unknown_fields_of_a_turn_are_not_restored() -> None:
    """Unknown fields of a Turn are not stored, and a cached state does not return them either."""
    turn = Turn([user("a")], extra={"new": 1})
    state = state_from_turn(turn, "openai", 1)
    assert state.turn().extra == {}
    assert state_from_turn(Turn([user("a")]), "openai", 1).turn().extra == {}


def add_response(turn: Turn, *blocks_made: Block, number: int) -> Turn:
    """Return the Turn with a response of these blocks."""
    plan = plan_request(turn, scope="openai/api", now=100.0 + number)
    noted = [
        block.with_source(Source(item_id=f"item_{number}_{i}"))
        for i, block in enumerate(blocks_made)
    ]
    return record_response(
        turn, noted, response_id=f"resp_{number}", plan=plan, created_at=100.25 + number
    )


def is_identical(one: ChatState, other: ChatState) -> bool:
    """Return whether two states are equal, including the serialized blocks."""
    forms = [[dump_block(block) for block in state.blocks] for state in (one, other)]
    return one == other and forms[0] == forms[1]


@given(
    st.lists(blocks(), max_size=5, unique_by=lambda block: block.id),
    st.text(max_size=8),
    st.integers(0, 5),
    json_objects(without=frozenset({"kedge.state"})),
    st.sampled_from([None, "chained", "stateless", "conversation"]),
)
def test_any_state_round_trips(
    block_list: list[Block], provider: str, length: int, data: dict[str, Any], mode: Any
) -> None:
    """State bytes can represent every Turn."""
    memory = ConversationState(mode, previous_response_id="resp_é", conversation_id="conv_1")
    turn = Turn(data=data)
    length = min(length, len(block_list))
    packed = StateMemory.pack(memory)
    state = ChatState(provider, tuple(block_list), length, packed, turn.id, turn.data)
    decoded = decode_state(encode_state(state), provider)
    assert isinstance(decoded, ChatState)
    assert is_identical(decoded, state)


def test_equal_states_have_equal_bytes() -> None:
    """A state without anchors has the same bytes whichever way it was made."""
    states = [
        ChatState("x", id="turn_1"),
        ChatState("x", id="turn_1", memory=StateMemory()),
        state_from_turn(Turn(id="turn_1"), "x", 0),
    ]
    assert states == [states[0]] * 3
    assert len({encode_state(state) for state in states}) == 1


def test_leading_system_blocks_are_not_stored_and_later_ones_are() -> None:
    """Leading system blocks are sent with each call; later ones are part of the state."""
    turn = Turn([system("be kind"), system("be brief"), user("hello"), system("now be rude")])
    state = state_from_turn(turn, "openai", 0)
    assert [type(block) is SystemBlock for block in state.blocks] == [False, True]


def test_state_bytes_are_json_with_a_checksum() -> None:
    """State bytes are readable JSON, and the checksum covers every byte before it."""
    data = encode_state(state_from_turn(make_turn(), "openai", 5))
    members = json.loads(data)
    assert members["version"] == 3
    assert members["provider"] == "openai"
    assert members["processed_length"] == 5
    covered = data[: data.index(b',"checksum"')]
    assert members["checksum"] == f"sha256:{hashlib.sha256(covered).hexdigest()}"


def sign(members: dict[str, Any]) -> bytes:
    """Return state bytes with a valid checksum for these members."""
    rest = {name: value for name, value in members.items() if name != "checksum"}
    covered = json.dumps(rest, separators=(",", ":")).encode()[:-1]
    data = covered + b',"checksum":"sha256:' + hashlib.sha256(covered).hexdigest().encode() + b'"}'
    assert has_valid_checksum(data)
    return data


VALID_STATE: dict[str, Any] = json.loads(encode_state(state_from_turn(make_turn(1), "openai", 2)))
ANCHOR = list(AnchorRecord.__annotations__)
"""The members of an anchor, in the order of the array."""


def change_anchor(index: int, value: Any, *more: Any) -> dict[str, Any]:
    """Return the valid state with another member of its last anchor, and further members."""
    *others, last = VALID_STATE["memory"]["anchors"]
    changed = [*last[:index], value, *last[index + 1 :], *more]
    return {**VALID_STATE, "memory": {"anchors": [*others, changed]}}


DISCARDED: list[tuple[str, bytes, str]] = [
    ("text", b"hello", "not_json"),
    ("cut off", encode_state(state_from_turn(make_turn(1), "openai", 2))[:-40], "not_json"),
    ("NaN", b'{"version":NaN}', "not_json"),
    ("a well", b"[" * 100_000, "not_json"),
    ("bytes", b"\xff\xfe\x00", "not_json"),
    ("a list", b"[]", "malformed"),
    ("a number", b"2", "malformed"),
    ("no version", b"{}", "version"),
    ("a newer version", sign({**VALID_STATE, "version": 4}), "version"),
    ("version zero", sign({**VALID_STATE, "version": 0}), "version"),
    ("a version that is none", sign({**VALID_STATE, "version": True}), "version"),
    ("no checksum", json.dumps(VALID_STATE).encode(), "damaged"),
    ("another checksum", json.dumps({**VALID_STATE, "checksum": "sha256:00"}).encode(), "damaged"),
    ("another provider", sign({**VALID_STATE, "provider": "xai"}), "provider"),
    ("no provider", sign({**VALID_STATE, "provider": None}), "provider"),
    ("too long", sign({**VALID_STATE, "processed_length": 99}), "malformed"),
    ("below zero", sign({**VALID_STATE, "processed_length": -1}), "malformed"),
    ("no length", sign({**VALID_STATE, "processed_length": None}), "malformed"),
    ("no blocks", sign({**VALID_STATE, "blocks": None}), "malformed"),
    ("a block that is none", sign({**VALID_STATE, "blocks": [7]}), "malformed"),
    ("a block of nothing", sign({**VALID_STATE, "blocks": [{}]}), "malformed"),
    ("a block twice", sign({**VALID_STATE, "blocks": [VALID_STATE["blocks"][0]] * 2}), "malformed"),
    ("half a character", sign({**VALID_STATE, "id": "\ud800"}), "malformed"),
    (
        "a text that is none",
        sign({**VALID_STATE, "blocks": [{"kind": "system", "id": "b", "text": 5}]}),
        "malformed",
    ),
    (
        "a source that is none",
        sign({**VALID_STATE, "blocks": [{"kind": "reasoning", "id": "b", "source": [5]}]}),
        "malformed",
    ),
    ("no anchors", sign({**VALID_STATE, "memory": {"anchors": 5}}), "malformed"),
    ("an anchor that is none", sign({**VALID_STATE, "memory": {"anchors": [5]}}), "malformed"),
    ("an anchor of nothing", sign({**VALID_STATE, "memory": {"anchors": [[]]}}), "malformed"),
    ("an anchor with more", sign(change_anchor(0, "resp_1", "more")), "malformed"),
    ("an anchor of a string", sign(change_anchor(ANCHOR.index("derived"), "ab")), "malformed"),
    ("an anchor of numbers", sign(change_anchor(ANCHOR.index("derived"), [1])), "malformed"),
    ("an anchor of another status", sign(change_anchor(ANCHOR.index("status"), "x")), "malformed"),
    ("a member of its own", sign({**VALID_STATE, "mood": 1}), "malformed"),
    ("a mode of its own", sign({**VALID_STATE, "memory": {"mode": "telepathic"}}), "malformed"),
    ("data that is none", sign({**VALID_STATE, "data": 5}), "malformed"),
    ("sealed", b"gAAAAABnothing", "encrypted"),
    ("version 1 without messages", b'{"version":1,"provider":"openai"}', "malformed"),
    (
        "version 1 with half a message",
        b'{"version":1,"provider":"openai","processed_length":0,"messages":[{}]}',
        "malformed",
    ),
]


@for_each(("data", "reason"), [each[1:] for each in DISCARDED])
def test_invalid_state_is_discarded_with_its_reason(data: bytes, reason: str) -> None:
    """Decoding an invalid state raises nothing and returns a reason code with a sentence."""
    decoded = decode_state(data, "openai")
    assert isinstance(decoded, DiscardedState)
    assert decoded.reason == reason
    assert DISCARD_REASONS[decoded.reason] in str(decoded)


@given(st.binary(max_size=200))
def test_decoding_random_bytes_does_not_raise(data: bytes) -> None:
    """Random bytes are never a valid state."""
    assert isinstance(decode_state(data, "openai"), DiscardedState)


def test_damage_never_raises_or_invents_history() -> None:
    """A mutated state is discarded, unless its bytes equal a stored state."""
    stored = [
        ChatState("openai"),
        state_from_turn(Turn([user("hello")]), "openai", 0),
        state_from_turn(make_turn(1), "openai", 4),
        state_from_turn(make_turn(4), "openai", 24),
    ]
    encoded = [encode_state(state) for state in stored]
    rng = random.Random(6)
    for _ in range(MUTATION_COUNT):
        data = mutate(rng, rng.choice(encoded))
        decoded = decode_state(data, "openai")
        if isinstance(decoded, ChatState):
            assert data in encoded
            assert is_identical(decoded, stored[encoded.index(data)])


def test_every_byte_is_checked() -> None:
    """A state with one changed byte, or truncated at any byte, is discarded."""
    data = encode_state(state_from_turn(make_turn(1), "openai", 4))
    rng = random.Random(7)
    for at in range(len(data)):
        changed = bytes([(data[at] + rng.randrange(1, 256)) % 256])
        assert isinstance(
            decode_state(data[:at] + changed + data[at + 1 :], "openai"), DiscardedState
        )
        assert isinstance(decode_state(data[:at], "openai"), DiscardedState)


@for_each(
    ("state", "expected"),
    [
        (None, b""),
        (b"x", b"x"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        ("é", b"\xc3\xa9"),
        ("x\n", b"x"),
        (b" x\r\n", b"x"),
        (bytearray(b"x\n"), b"x"),
    ],
)
def test_state_may_have_several_types(state: Any, expected: bytes) -> None:
    """``None`` is an empty state; buffers and text are converted to bytes."""
    assert as_bytes(state) == expected


def test_other_types_are_not_a_state() -> None:
    """A value that is not bytes or text is discarded, as any other invalid state."""
    assert isinstance(decode_state(as_bytes(7), "openai"), DiscardedState)


def test_state_bytes_are_small() -> None:
    """A state has at most the escaped text, 200 bytes per block and 320 per response with realistic ids."""
    turn = Turn()
    for i in range(50):
        turn = turn.append(user(f'question "{i}": 漢字'))
        plan = plan_request(turn, scope="openai/api.openai.com/v1/0123456789abcdef", now=float(i))
        call = tool_call("get_weather", '{"city":"x"}', call_id=f"call_{i:024d}")
        turn = record_response(
            turn,
            [
                reasoning("thought").with_source(Source(item_id=f"rs_{i:050d}")),
                call.with_source(Source(item_id=f"fc_{i:050d}")),
            ],
            response_id=f"resp_{i:048d}",
            plan=plan,
            created_at=1763200000.1234567 + i,
        )
        turn = turn.append(tool_result(f"call_{i:024d}", "sunny " * 20))
        turn = record_response(
            turn,
            [assistant("It is sunny.\n" * 5).with_source(Source(item_id=f"msg_{i:050d}"))],
            response_id=f"resp_{i:048d}b",
            plan=plan_request(
                turn, scope="openai/api.openai.com/v1/0123456789abcdef", now=float(i)
            ),
            created_at=1763200000.7654321 + i,
        )
    data = encode_state(state_from_turn(turn, "openai", len(turn)))
    assert len(data) <= sum(map(escaped_size, turn.blocks)) + 200 * len(turn) + 320 * 100


def test_memory_of_a_conversation_is_bounded() -> None:
    """A decoded state that is planned and encoded again uses at most 3,000 bytes per block."""
    data = encode_state(state_from_turn(make_turn(100), "openai", 0))
    decode_state(data, "openai")  # loads everything that is loaded once
    gc.collect()
    tracemalloc.start()
    try:
        state = decode_state(data, "openai")
        assert isinstance(state, ChatState)
        turn = state.turn(following=(user("more"),))
        plan = plan_request(turn, scope="openai/api", now=0.0)
        remembered = state_from_turn(turn, "openai", 0)
        encoded = encode_state(remembered)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.delta) == 2
    assert len(encoded) > len(data)
    assert size / len(remembered.blocks) < 3_000


def escaped_size(block: Block) -> int:
    """Return the size of the text of a block in JSON."""
    form = dump_block(block)
    texts = [form.get("arguments", ""), *form.get("summary", []), *form.get("texts", [])]
    texts += [part.get("text", "") for part in form.get("parts", [])]
    return sum(len(json.dumps(text, ensure_ascii=False).encode()) - 2 for text in texts)


def records() -> st.SearchStrategy[AnchorRecord]:
    """Generate anchor records."""
    times = st.floats(0, 2e9)
    return st.builds(
        AnchorRecord,
        response_id=st.sampled_from(["resp_1", "resp_2", "resp_3"]),
        scope=st.sampled_from(["openai", "practice", "é"]),
        digest=st.text("0123456789abcdef", min_size=4, max_size=8),
        block_count=st.integers(0, 50),
        depth=st.integers(1, 50),
        root_created_at=times,
        status=st.sampled_from(["completed", "lost", "incomplete"]),
        stored=st.booleans(),
        created_at=times,
        expires_at=st.none() | times,
        barrier=st.none() | st.integers(0, 50),
        derived=st.lists(st.text("0123456789abcdef", max_size=4), max_size=2).map(tuple),
        counted=st.none() | st.builds(TokenCounts, *[st.integers(0, 9)] * 6),
    )


@given(st.lists(records(), max_size=6))
def test_any_anchors_round_trip(anchors: list[AnchorRecord]) -> None:
    """Anchors are unchanged after a round trip, with their order and all their members."""
    memory = ConversationState(anchors=tuple(anchors))
    state = ChatState("openai", memory=StateMemory.pack(memory))
    decoded = decode_state(encode_state(state), "openai")
    assert isinstance(decoded, ChatState)
    assert get_state(decoded.turn()) == memory


def test_infinite_expiry_is_no_expiry() -> None:
    """An infinite expiry is stored as no expiry, because JSON has no infinity."""
    record = AnchorRecord("resp_1", "s", "sha256:0", 1, expires_at=float("inf"))
    memory = StateMemory.pack(ConversationState(anchors=(record,)))
    decoded = decode_state(encode_state(ChatState("openai", memory=memory)), "openai")
    assert isinstance(decoded, ChatState)
    assert get_state(decoded.turn()).anchors[0].expires_at is None
