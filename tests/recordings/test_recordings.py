"""The replay of recorded exchanges, with a small folder that the tests write."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from kedge.engines import ResponsesEngine
from kedge.turns import Turn
from recordings.check_recordings import Report, check, main
from recordings.exchanges import read_folder

USAGE = {"input_tokens": 9, "output_tokens": 3, "total_tokens": 12}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}


HOSTS = {"responses": "api.openai.com", "chat": "openrouter.ai", "messages": "api.anthropic.com"}


def make_response(text: str, number: int = 1, **members: Any) -> dict[str, Any]:
    """Return an object of the Responses API with one message."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "gpt-5.1",
        "previous_response_id": None,
        "output": [{**MESSAGE, "content": content}],
        "usage": {**USAGE, "input_tokens": 9 * number},
        **members,
    }


def make_stream(*events: dict[str, Any]) -> str:
    """Return a stream of these events."""
    return "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)


def make_line(api: str, name: str, request: dict[str, Any], body: Any, **members: Any) -> str:
    """Return a line of a recording."""
    text = body if isinstance(body, str) else json.dumps(body)
    line = {"name": name, "api": api, "host": HOSTS.get(api), "status": 200, "request": request}
    return json.dumps({**line, "body": text, **members})


def make_responses_lines() -> list[str]:
    """Return a conversation of two requests, one with a stream."""
    first, second = make_response("Hello."), make_response("Bye.", 2)
    question, empty = {"role": "user", "content": "Hi"}, {**MESSAGE, "content": []}
    delta = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0}
    stream = make_stream(
        {"type": "response.created", "response": {**second, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": empty},
        {**delta, "item_id": "msg_1", "delta": "Bye."},
        {"type": "response.output_item.done", "output_index": 0, "item": second["output"][0]},
        {"type": "response.completed", "response": second},
    )
    answer = {"role": "assistant", "content": "Hello."}
    request = {"model": "gpt-5.1", "input": [question]}
    again = {**request, "input": [question, answer, {"role": "user", "content": "Bye"}]}
    return [
        make_line("responses", "talk#0", request, first),
        make_line("responses", "talk#1", {**again, "stream": True}, stream),
    ]


def make_chat_lines() -> list[str]:
    """Return a completion, and an error."""
    request = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    message = {"role": "assistant", "content": "Hello."}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    counts = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    completion = {"id": "gen-1", "model": "m", "created": 1, "choices": [choice], "usage": counts}
    error = {"error": {"message": "No such model.", "code": 404}}
    return [
        make_line("chat", "chat#0", request, completion),
        make_line("chat", "error#0", request, error, status=404),
    ]


def make_messages_line() -> str:
    """Return a message with a call."""
    question = {"role": "user", "content": "Hi"}
    request = {"model": "claude-opus-4-8", "max_tokens": 10, "messages": [question]}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-4-8",
        "content": [{"type": "text", "text": "Let me see."}, call],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 4, "output_tokens": 6},
    }
    return make_line("messages", "call#0", request, message)


def write_folder(folder: Path, *lines: str) -> Path:
    """Write a folder with one file."""
    (folder / "recorded.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def replay_folder(folder: Path) -> Report:
    """Replay a folder."""
    return anyio.run(check, read_folder(folder))


def test_recordings_of_all_apis_are_replayed_without_differences(tmp_path: Path) -> None:
    """Answers, an error and a conversation are read, sent back, judged and chained."""
    lines = [*make_responses_lines(), *make_chat_lines(), make_messages_line()]
    report = replay_folder(write_folder(tmp_path, *lines))
    assert report.differences == []
    counts = {"responses": 2, "chat": 2, "messages": 1}
    assert report.replayed == {(api, HOSTS[api]): count for api, count in counts.items()}
    assert (report.judged, report.chained) == (1, 1)


def test_an_answer_that_is_read_otherwise_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream whose end lists another text than its events is reported, with exit code 1."""
    listed = make_response("Something else.")
    item = {**MESSAGE, "content": [{"type": "output_text", "text": "Hello."}]}
    stream = make_stream(
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": listed},
    )
    line = make_line("responses", "other#0", {"model": "gpt-5.1", "input": "Hi"}, stream)
    assert main(str(write_folder(tmp_path, line))) == 1
    printed = capsys.readouterr().out
    assert 'texts: recorded ["Something else."], Kedge has ["Hello."]' in printed
    assert "1 exchanges, 1 with differences" in printed


def test_a_rejected_body_and_an_unknown_event_are_differences(tmp_path: Path) -> None:
    """A body that the strict server rejects is reported, and an event type that is not documented."""
    answer = make_response("Hello.")
    stream = make_stream(
        {"type": "response.something_new.delta", "delta": "x"},
        {"type": "response.completed", "response": answer},
    )
    request = {"model": "gpt-5.1", "input": "Hi", "unheard_of": 1}
    report = replay_folder(write_folder(tmp_path, make_line("responses", "new#0", request, stream)))
    rejected, unknown = report.differences
    assert rejected.startswith("new#0: rejected by the strict server: ")
    assert unknown == "events of type response.something_new.delta are passed on and not documented"


def test_what_is_not_read_is_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other APIs, other paths and frames of WebSockets are not read, and are no differences."""
    request, answer = {"model": "gpt-5.1", "input": "Hi"}, make_response("Hello.")
    lines = [
        make_line("responses", "hello#0", request, answer, path="POST /v1/responses?x=1"),
        make_line("interactions", "other#0", request, {"id": "v1_1"}),
        make_line("responses", "stored#0", request, answer, path="GET /v1/responses/resp_1"),
        make_line("responses", "frames#0", request, "{}", status=101),
    ]
    assert main(str(write_folder(tmp_path, *lines))) == 0
    printed = capsys.readouterr().out
    assert "1 exchanges, 0 with differences" in printed
    for kind in (
        "API interactions",
        "API responses, GET /v1/responses/ID",
        "API responses, frames of a WebSocket",
    ):
        assert f"not read: 1 exchanges ({kind})" in printed


def make_compaction_line(*messages: str) -> str:
    """Return a compaction of a context, of which these messages are retained."""
    retained = [
        {**MESSAGE, "role": "user", "content": [{"type": "input_text", "text": text}]}
        for text in messages
    ]
    item = {"type": "compaction", "id": "cmp_1", "encrypted_content": "sealed"}
    answer = {"object": "response.compaction", "output": [*retained, item], "usage": USAGE}
    request = {"model": "gpt-5.1", "input": [{"role": "user", "content": "Hi"}]}
    return make_line("responses", "c#0", request, answer, path="POST /v1/responses/compact")


def test_a_compaction_is_replayed_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compacted context is read and sent back, and an item that is not sent back is a difference."""
    folder = write_folder(tmp_path, make_compaction_line("Hi", "How are you?"))
    assert replay_folder(folder).differences == []
    compact = ResponsesEngine.compact

    async def compact_without_first(engine: ResponsesEngine, turn: Turn) -> Any:
        blocks, usage = await compact(engine, turn)
        return blocks[1:], usage

    monkeypatch.setattr(ResponsesEngine, "compact", compact_without_first)
    whole, cut = replay_folder(folder).differences
    assert whole.startswith('c#0: whole: sent back: no item like {"type": "compaction"')
    assert cut.startswith("c#0: cut: sent back: no item like")


def test_the_first_of_several_answers_is_read(tmp_path: Path) -> None:
    """A recording of several streams is read up to the end of the first, and counted; a gap of it is no difference."""
    stream = make_stream(
        {"type": "response.created", "sequence_number": 0, "response": make_response("")},
        {"type": "response.completed", "sequence_number": 5, "response": make_response("Hello.")},
    )
    several = stream + make_stream({"type": "response.completed", "response": make_response("No.")})
    request = {"model": "gpt-5.1", "input": "Hi"}
    report = replay_folder(
        write_folder(tmp_path, make_line("responses", "two#0", request, several))
    )
    assert report.differences == []
    assert report.limited == {"have several answers, of which the first is read": 1}


def test_a_request_that_was_not_recorded_is_not_sent(tmp_path: Path) -> None:
    """An answer without its request is read, and nothing is sent to the strict server."""
    line = make_line("responses", "a#0", {}, make_response("Hello."))
    report = replay_folder(write_folder(tmp_path, line))
    assert report.differences == []
    assert report.limited == {"have no recorded request to send to the strict server": 1}


def test_a_reference_to_stored_reasoning_is_not_sent(tmp_path: Path) -> None:
    """Reasoning that has only its id is stored with its provider, and not with the strict server."""
    stored = {"type": "reasoning", "id": "rs_1", "summary": []}
    items = [{"role": "user", "content": "Hi"}, stored, {"role": "user", "content": "And?"}]
    request = {"model": "gpt-5.1", "input": items}
    line = make_line("responses", "a#0", request, make_response("Hello."))
    assert replay_folder(write_folder(tmp_path, line)).differences == []


def test_a_folder_without_recordings_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder is not a success: the path may be wrong."""
    assert main(str(tmp_path)) == 2
    assert "no recorded exchanges" in capsys.readouterr().out
