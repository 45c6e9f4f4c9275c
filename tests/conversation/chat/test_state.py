"""State bytes: encoding, encryption, detection of damage, inspection, and the import of version 1."""

import hashlib
import json
import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from conversation.chat.conftest import OpenChat
from conversation.chat.state_mutations import mutate
from for_each import for_each
from kedge.conversation import Chat
from kedge.conversation.chat_state import (
    DISCARD_REASONS,
    ENCRYPTED_PREFIX,
    ChatState,
    DiscardedState,
    FernetCipher,
    RecentStates,
    StateReport,
    as_bytes,
    build_report,
    decode_state,
    encode_state,
    has_valid_checksum,
    import_messages,
    is_encrypted,
    leave_out,
    new_key,
    state_from_turn,
)
from kedge.errors import InvalidSetting
from kedge.planning import (
    AnchorRecord,
    ConversationState,
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
from middleware.scripted_engine import ScriptedEngine
from planning.recorded_turns import records
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
    """After any change, a decoded state gives the same Turn and digests; a cached earlier state changes no byte."""
    rng = random.Random(11)
    for _ in range(40):
        turn, earlier = Turn([system("be kind")] * rng.randrange(2)), ChatState("openai")
        for number in range(rng.randrange(2, 14)):
            turn = change_turn(rng, turn, number)
            if number == 5:
                turn = turn.append(user("more", extra={"unknown": {"member": [1.5, None]}}))
            state = state_from_turn(turn, "openai", 0)
            data = encode_state(state, earlier)
            assert data == encode_state(structs.replace(state))
            decoded = decode_state(data, "openai")
            assert isinstance(decoded, ChatState)
            assert decoded == state
            leading, following = (system("a"),) * rng.randrange(2), (user("more"),)
            sent, expected = state.turn(leading, following), decoded.turn(leading, following)
            assert json.loads(dumps(sent)) == json.loads(dumps(expected))
            assert prefix_digest(sent) == prefix_digest(expected)
            assert find_problems(sent) == find_problems(expected)
            earlier = rng.choice([state, earlier, decoded])


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
    st.lists(records(), max_size=6),
    st.text(max_size=8),
    st.integers(0, 5),
    json_objects(without=frozenset({"kedge.state"})),
    st.sampled_from([None, "chained", "stateless", "conversation"]),
)
def test_any_state_round_trips(
    block_list: list[Block],
    anchors: list[AnchorRecord],
    provider: str,
    length: int,
    data: dict[str, Any],
    mode: Any,
) -> None:
    """State bytes can represent every Turn, and all members of its anchors in their order."""
    memory = ConversationState(mode, "resp_é", "conv_1", anchors=tuple(anchors))
    turn = Turn(data=data)
    length = min(length, len(block_list))
    state = ChatState(provider, tuple(block_list), length, memory, turn.id, turn.data)
    decoded = decode_state(encode_state(state), provider)
    assert isinstance(decoded, ChatState)
    assert is_identical(decoded, state)
    assert get_state(decoded.turn()) == memory


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


def make_version_1(*messages: Any, processed: int = 0) -> dict[str, Any]:
    """Return a state of version 1."""
    members = {"version": 1, "provider": "openai", "processed_length": processed}
    return {**members, "messages": list(messages)}


def change_block(**members: Any) -> bytes:
    """Return the valid state with one block of these members."""
    return sign({**VALID_STATE, "blocks": [members]})


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
    ("a text that is none", change_block(kind="system", id="b", text=5), "malformed"),
    ("a source that is none", change_block(kind="reasoning", id="b", source=[5]), "malformed"),
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
    ("neither bytes nor text", as_bytes(7), "not_json"),
    ("version 1 without messages", b'{"version":1,"provider":"openai"}', "malformed"),
    ("half a message", json.dumps(make_version_1({})).encode(), "malformed"),
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


def test_state_may_have_several_types() -> None:
    """``None`` is an empty state; buffers and text are converted to bytes, without blanks around them."""
    assert as_bytes(None) == b""
    for state in (b" x\r\n", bytearray(b"x\n"), memoryview(b"x"), "x\n"):
        assert as_bytes(state) == b"x"
    assert as_bytes("é") == b"\xc3\xa9"


def test_state_bytes_are_small() -> None:
    """A state has at most the escaped text, 200 bytes per block and 320 per response."""
    turn = make_turn(50)
    data = encode_state(state_from_turn(turn, "openai", len(turn)))
    assert len(data) <= sum(map(escaped_size, turn.blocks)) + 200 * len(turn) + 320 * 100


def escaped_size(block: Block) -> int:
    """Return the size of the text of a block in JSON."""
    form = dump_block(block)
    texts = [form.get("arguments", ""), *form.get("summary", []), *form.get("texts", [])]
    texts += [part.get("text", "") for part in form.get("parts", [])]
    return sum(len(json.dumps(text, ensure_ascii=False).encode()) - 2 for text in texts)


def test_blocks_that_are_left_out_are_not_counted() -> None:
    """The number of blocks that a model has read is without those that cannot be sent."""
    listed = tuple(user(name, id=name) for name in "abcd")
    left = leave_out(ChatState("openai", listed, 3), {"b", "d"})
    assert ("".join(block.id for block in left.blocks), left.processed_length) == ("ac", 2)


def test_infinite_expiry_is_no_expiry() -> None:
    """An infinite expiry is stored as no expiry, because JSON has no infinity."""
    record = AnchorRecord("resp_1", "s", "sha256:0", 1, expires_at=float("inf"))
    memory = ConversationState(anchors=(record,))
    decoded = decode_state(encode_state(ChatState("openai", memory=memory)), "openai")
    assert isinstance(decoded, ChatState)
    assert get_state(decoded.turn()).anchors[0].expires_at is None


@for_each(("processed", "left"), [(0, 0), (1, 0), (2, 0), (3, 1)])
def test_leading_system_messages_are_omitted_and_not_counted(processed: int, left: int) -> None:
    """Leading system messages are not part of an imported state; later ones are."""
    rules, more = {"role": "system", "content": "Be kind"}, {"role": "developer", "content": "Now"}
    message = {"role": "user", "content": "Ada"}
    imported = import_messages(make_version_1(rules, rules, message, more, processed=processed))
    assert len(imported.blocks) == 2
    assert imported.processed_length == left


CALL = {"name": "weather", "arguments": '{"city":"Oslo"}'}
WEATHER = {"id": "call_1", "type": "function", "function": CALL}
CHAT_COMPLETIONS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [WEATHER]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def test_chat_completions_messages_become_blocks() -> None:
    """Tool calls and results are converted too, and the processed length counts blocks."""
    imported = import_messages(make_version_1(*CHAT_COMPLETIONS, processed=5))
    assert imported.is_imported
    assert list(imported.blocks) == [
        user("Weather in Oslo?"),
        tool_call("weather", '{"city":"Oslo"}', call_id="call_1"),
        tool_result("call_1", "rain"),
        assistant("It rains."),
    ]
    assert imported.processed_length == 4


@for_each(
    "message",
    [
        {"role": "user", "content": 5},
        {"role": "narrator", "content": "Once upon a time"},
        {"role": "user", "content": [{"type": "tool_result", "content": "rain"}]},
        {"role": "assistant", "tool_calls": [{"id": "call_1"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "tool", "content": "rain"},
        {"role": "assistant"},
        {"type": "function_call", "name": 5},
    ],
)
async def test_unconvertible_state_is_discarded(message: Any) -> None:
    """The state is reported as malformed, a call with it starts fresh, and its result can be continued."""
    state = json.dumps({**make_version_1(message), "provider": "scripted"})
    chat = Chat(ScriptedEngine([assistant("Hello")], [assistant("Hello again")]))
    assert chat.inspect_state(state).reason == "malformed"
    answer = await chat.chat_with_state(state, "Hello")
    assert answer.discarded is not None
    assert answer.discarded.reason == "malformed"
    assert len(answer.turn) == 2
    assert (await chat.chat_with_state(answer.state, "Hello")).discarded is None


SECRET = b'{"version": 2, "blocks": ["my name is Ada Lovelace"]}'


def test_encrypted_bytes() -> None:
    """Bytes are recognized by their prefix and decrypted only unchanged and with the same key."""
    key = new_key()
    sealer = FernetCipher(key)
    encrypted = FernetCipher(key.encode()).encrypt(SECRET)
    assert sealer.decrypt(encrypted) == SECRET
    assert b"Ada Lovelace" not in encrypted
    assert (is_encrypted(encrypted), is_encrypted(SECRET)) == (True, False)
    assert FernetCipher(new_key()).decrypt(encrypted) is None
    for position in (len(ENCRYPTED_PREFIX) + 2, len(encrypted) // 2, len(encrypted) - 4):
        flipped = b"A" if encrypted[position : position + 1] != b"A" else b"B"
        assert sealer.decrypt(encrypted[:position] + flipped + encrypted[position + 1 :]) is None
    assert sealer.decrypt(encrypted[:-8]) is None
    assert sealer.decrypt(SECRET) is None


@for_each("keys", ["hunter2", b"hunter2", ["hunter2"], [""]])
def test_invalid_key_is_rejected_without_quoting_it(keys: str | bytes | list[str]) -> None:
    """The error explains how to create a key, and neither it nor its cause contains the given one."""
    with pytest.raises(InvalidSetting, match="new_key") as exc_info:
        FernetCipher(keys)
    assert "hunter2" not in str(exc_info.value)
    assert exc_info.value.__cause__ is None


def test_discarded_state_is_reported_with_its_reason() -> None:
    """An unusable state is reported with a reason code and a sentence."""
    form = {"version": 99, "provider": "openai"}
    for data, message in (
        (b"[]", "version unknown"),
        (json.dumps(form).encode(), "version 99, provider openai"),
        (json.dumps({**form, "version": True, "provider": 5}).encode(), "version unknown"),
        (json.dumps({**form, "provider": "p" * 200}).encode(), f"provider {'p' * 80}\n"),
    ):
        report = build_report(data, "openai", None)
        assert not report.usable
        assert report.reason
        assert message in str(report)
        assert f"would be discarded: {report.problem}" in str(report)
        assert (report.blocks, report.pending) == (0, 0)


async def test_report_of_a_state(open_chat: OpenChat) -> None:
    """A state is usable for its own or any provider, not for another; its report has counts and no text."""
    chat = open_chat()
    answer = await chat.chat_with_state(b"", user("My name is Ada Lovelace."))
    state = chat.write_state(answer.state, answer.turn.append(user("One more thing")))
    report = build_report(state, None, None)
    assert (report.usable, report.reason, report.size) == (True, None, len(state))
    assert (report.blocks, report.processed_length, report.pending) == (3, 2, 1)
    assert (report.responses, dict(report.kinds)) == (1, {"user": 2, "assistant": 1})
    assert "Ada" not in str(report)
    report = build_report(state, "somebody else", None)
    assert not report.usable
    assert report.provider == build_report(state, None, None).provider
    assert build_report(b"", "openai", None) == StateReport(usable=True, size=0)
