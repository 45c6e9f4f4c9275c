"""Tests of the lines that a chat prints in addition to the answer."""

import re
from pathlib import Path
from typing import Any

import click
import pytest

from for_each import for_each
from kedge.cli.chat_output import TextOutput, format_event, format_status
from kedge.cli.chat_tools import load_tool
from kedge.cli.show import print_blocks
from kedge.events import ReasoningDelta, RefusalDelta, RequestRecord, TextDelta
from kedge.events.run import FellBack, Healed, OutputRejected, ServerForgot, ToolFinished
from kedge.turns import assistant, opaque, reasoning, tool_call, tool_result, user

TOOL_CALL = tool_call("look", {"at": "\x1b[2J sea"}, call_id="call_1")


def test_events_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Tool calls, healed, resent and lost responses are one line each, on a line of their own."""
    result = tool_result("call_1", "x" * 100 + "\nsecond line")
    line = format_event(ToolFinished(TOOL_CALL, result))
    assert line.startswith("[look {")
    assert line.endswith("…]")
    assert "second" not in line
    assert "\x1b" not in line
    assert format_event(ToolFinished(TOOL_CALL, tool_result("call_1", " "))).endswith("-> ]")
    for event in (Healed("gone"), FellBack("expired"), ServerForgot("resp_1")):
        assert re.fullmatch(r"\[[^\n]+\]", format_event(event))
    assert format_event(TextDelta("x")) == ""
    for details in (False, True):
        output = TextOutput(details=details)
        output.start()
        output.show_event(RefusalDelta("I cannot"))
        output.show_event(Healed("gone"))
        output.stop()
        note = f"{format_event(Healed('gone'))}\n" if details else ""
        assert capsys.readouterr().out == f"I cannot\n{note}"
        assert output.notes.lines == [format_event(Healed("gone"))]


def test_line_after_an_answer_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the reason of a full send, calls, reasoning and rejected answers; a lost context comes first."""
    facts: Any = {
        "provider": "p",
        "scope": "s",
        "mode": "chained",
        "sent_blocks": 3,
        "sent_bytes": 30,
    }
    output = TextOutput()
    output.start()
    output.show_event(ReasoningDelta("let me see"))
    output.show_event(ToolFinished(TOOL_CALL, tool_result("call_1", "5")))
    output.show_event(OutputRejected(1, ("no",)))
    summary = "1 tool call, 1 answer rejected, about 3 words of reasoning]"
    sizes = "sent 3 of 3 blocks, 30 B of 30 B"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reason": "new"}, "[new chain"),
        ({"reason": "expired"}, "[sent in full: expired"),
        (
            {"reason": "lost", "healed": "gone"},
            "[sent in full: the server no longer had the earlier response",
        ),
    ]
    for record, expected in cases:
        line = format_status([RequestRecord(**facts, **record)], output.notes)
        assert line == f"{expected}, {sizes}, {summary}"
    output.show_event(ServerForgot("resp_1"))
    line = format_status([RequestRecord(**facts)], output.notes)
    assert line.startswith("[the server answered without the earlier context, chained, ")
    output.start()
    assert (
        format_status([RequestRecord(**facts, reason="new")], output.notes)
        == f"[new chain, {sizes}]"
    )
    assert capsys.readouterr().out == ""


def test_show_collapses_and_expands_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasoning, tool calls and results are one line each, or complete with ``--full``."""
    blocks = [
        user("Look.", origin="guard"),
        reasoning(summary=["Where is it?"]),
        TOOL_CALL,
        tool_result("call_1", "The sea.\nAll of it."),
        opaque({"type": "web_search_call", "id": "ws_1"}),
        reasoning(encrypted_content="sealed"),
        assistant("I see the sea."),
    ]
    print_blocks(blocks, full=False)
    brief = capsys.readouterr().out
    assert "You (by guard)" in brief
    assert "[tool call: " in brief
    assert "\x1b" not in brief
    print_blocks(blocks, full=True)
    text = capsys.readouterr().out
    assert "Where is it?" in text
    assert "The sea.\nAll of it." in text
    assert "(encrypted)" in text
    assert "sealed" not in text


@for_each(
    ("path", "message"),
    [
        ("nothing", "module:function"),
        (":f", "module:function"),
        ("no_such_module_here:f", "cannot import"),
        ("tool_with_syntax_error:f", "cannot import .*: SyntaxError"),
        ("json:nothing", "has no function"),
        ("json:dump_", "did you mean 'dumps'|did you mean 'dump'"),
        ("json:__name__", "has no function"),
    ],
)
def test_invalid_tool_is_rejected_with_message(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is missing and how to name a tool."""
    (tmp_path / "tool_with_syntax_error.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(click.BadParameter, match=message):
        load_tool(path)
