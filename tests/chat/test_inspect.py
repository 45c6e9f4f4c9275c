"""Reports about state bytes, which contain no message text."""

import json

from chat.conftest import OpenChat
from kedge.chat.state import FernetCipher, StateReport, build_report, new_key
from kedge.turns import user


def test_empty_state_is_a_fresh_conversation() -> None:
    """An empty state is usable and reported as a fresh conversation."""
    report = build_report(b"", "openai", None)
    assert report == StateReport(usable=True, size=0)
    assert str(report) == "no state: a fresh conversation"


async def test_report_does_not_contain_message_text(open_chat: OpenChat) -> None:
    """A report has the size, version, provider, block counts by kind, and pending blocks."""
    chat = open_chat()
    answer = await chat.chat_with_state(b"", user("My name is Ada Lovelace."))
    state = chat.write_state(answer.state, answer.turn.append(user("One more thing")))
    report = build_report(state, None, None)
    assert (report.usable, report.reason, report.problem) == (True, None, "")
    assert (report.size, report.version, report.encrypted) == (len(state), 3, False)
    assert (report.blocks, report.processed_length, report.pending) == (3, 2, 1)
    assert (report.responses, dict(report.kinds)) == (1, {"user": 2, "assistant": 1})
    assert str(report).splitlines() == [
        f"{len(state)} bytes, version 3, provider {report.provider}",
        "blocks: 3 (2 user, 1 assistant), pending: 1",
        "responses to chain on: 1",
    ]
    assert "Ada" not in str(report)


def test_discarded_state_is_reported_with_its_reason() -> None:
    """An unusable state is reported with a reason code and a sentence."""
    form = {"version": 99, "provider": "openai"}
    for data, message in (
        (b"\xff\xfe", "version unknown"),
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


async def test_state_of_another_provider_is_not_usable(open_chat: OpenChat) -> None:
    """A valid state is usable for its own or any provider, and not for another one."""
    state = (await open_chat().chat_with_state(b"", user("Hello"))).state
    assert build_report(state, None, None).usable
    report = build_report(state, "somebody else", None)
    assert not report.usable
    assert report.provider == build_report(state, None, None).provider


async def test_encrypted_state_is_reported_with_its_key(open_chat: OpenChat) -> None:
    """Without the key, the report says only that the state is encrypted."""
    key = new_key()
    state = (await open_chat(state_key=key).chat_with_state(b"", user("Hello"))).state
    inside, outside = build_report(state, None, FernetCipher(key)), build_report(state, None, None)
    assert (inside.usable, inside.encrypted, inside.blocks) == (True, True, 2)
    assert (outside.usable, outside.encrypted, outside.blocks) == (False, True, 0)
    assert str(inside).startswith(f"{len(state)} bytes, encrypted, version 3")
