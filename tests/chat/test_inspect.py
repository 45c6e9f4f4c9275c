"""What a person is told about state bytes: all that matters, and no message."""

import json

from chat.conftest import OpenChat
from kedge.chat.encryption import StateCipher, new_key
from kedge.chat.inspect import StateReport, build_report
from kedge.turns import user


def test_no_bytes_are_a_fresh_conversation() -> None:
    """Nothing is wrong with them."""
    found = build_report(b"", "openai", None)
    assert found == StateReport(usable=True, size=0)
    assert str(found) == "no state: a fresh conversation"


async def test_a_state_is_described_without_its_words(open_chat: OpenChat) -> None:
    """Size, version, provider, how many blocks of which kind, and what is pending."""
    chat = open_chat()
    answer = await chat.chat_with_state(b"", user("My name is Ada Lovelace."))
    state = chat.append_to_state(answer.state, user("One more thing"))
    found = build_report(state, None, None)
    assert (found.usable, found.reason, found.problem) == (True, None, "")
    assert (found.size, found.version, found.encrypted) == (len(state), 2, False)
    assert (found.blocks, found.processed_length, found.pending) == (3, 2, 1)
    assert (found.responses, dict(found.kinds)) == (1, {"user": 2, "assistant": 1})
    assert str(found).splitlines() == [
        f"{len(state)} bytes, version 2, provider {found.provider}",
        "blocks: 3 (2 user, 1 assistant), pending: 1",
        "responses to chain on: 1",
    ]
    assert "Ada" not in str(found)


def test_what_would_be_discarded_is_told_with_its_reason() -> None:
    """In a word for code, in a sentence for a person."""
    form = {"version": 99, "provider": "openai"}
    for data, words in (
        (b"\xff\xfe", "version unknown"),
        (b"[]", "version unknown"),
        (json.dumps(form).encode(), "version 99, provider openai"),
        (json.dumps({**form, "version": True, "provider": 5}).encode(), "version unknown"),
        (json.dumps({**form, "provider": "p" * 200}).encode(), f"provider {'p' * 80}\n"),
    ):
        found = build_report(data, "openai", None)
        assert not found.usable
        assert found.reason
        assert words in str(found)
        assert f"would be discarded: {found.problem}" in str(found)
        assert (found.blocks, found.pending) == (0, 0)


async def test_another_providers_state_is_told_apart(open_chat: OpenChat) -> None:
    """It is whole, and not for this provider; asked about any provider, it is usable."""
    state = (await open_chat().chat_with_state(b"", user("Hello"))).state
    assert build_report(state, None, None).usable
    found = build_report(state, "somebody else", None)
    assert not found.usable
    assert found.provider == build_report(state, None, None).provider


async def test_a_sealed_state_is_described_to_the_holder_of_its_key(open_chat: OpenChat) -> None:
    """Others are told that it is encrypted, and no more."""
    key = new_key()
    state = (await open_chat(key=key).chat_with_state(b"", user("Hello"))).state
    inside, outside = build_report(state, None, StateCipher(key)), build_report(state, None, None)
    assert (inside.usable, inside.encrypted, inside.blocks) == (True, True, 2)
    assert (outside.usable, outside.encrypted, outside.blocks) == (False, True, 0)
    assert str(inside).startswith(f"{len(state)} bytes, encrypted, version 2")
