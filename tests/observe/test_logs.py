"""Logging with the standard library: the TRACE level, ids as fields, and lines of text or JSON."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from kedge import Turn, connect, user
from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.errors import InvalidSetting
from kedge.observe import (
    ContextFilter,
    bind_fields,
    get_logger,
    log_to_stderr,
    reset,
    snapshot,
)
from kedge.store import open_store
from kedge.testing import serve


def test_invalid_level_or_format_is_rejected() -> None:
    """The error message lists the valid values."""
    for level, form in (("loud", "text"), ("info", "xml")):
        with pytest.raises(InvalidSetting, match="use one of"):
            log_to_stderr(level, form)


def test_library_is_silent_by_default() -> None:
    """Without logging configuration, a warning is not written to standard error."""
    code = "from kedge.observe import get_logger; get_logger('kedge.x').warning('hush')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Yield a stream for log output, and restore the loggers afterwards."""
    root = logging.getLogger("kedge")
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def practice() -> AsyncIterator[Engine]:
    """Yield an engine connected to a real server."""
    with serve() as server:
        async with connect(f"responses:{server.base_url}#practice") as engine:
            yield engine


def parse_lines(written: io.StringIO) -> list[dict[str, str]]:
    """Return the lines parsed as JSON."""
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_json_is_one_object_per_line(written: io.StringIO) -> None:
    """A JSON line has time, level, logger, message, ids, and an exception; the second call replaces the handler."""
    log_to_stderr("info", "text", written)
    log_to_stderr("trace", "json", written)
    log = get_logger("kedge.test")
    log.trace("a step of %d", 3, response_id="resp_1")
    try:
        int("no")
    except ValueError:
        log.exception("it\nfailed", call_id="call_1")
    first, second = parse_lines(written)
    assert first["level"] == "trace"
    assert first["logger"] == "kedge.test"
    assert first["message"] == "a step of 3"
    assert first["response_id"] == "resp_1"
    assert first["time"].endswith("Z")
    assert second["message"] == "it\nfailed"
    assert "ValueError" in second["exception"]


def test_text_is_one_line_with_ids_at_its_end(written: io.StringIO) -> None:
    """A line ends with the ids, quoted; those of a traceback are indented; records of SDKs are not shown."""
    log_to_stderr("info", "text", written)
    get_logger("kedge.test").info("sent", response_id="resp_1", call_id="", turn_id=None)
    get_logger("kedge.test").debug("never")
    (line,) = written.getvalue().splitlines()
    assert line.endswith("INFO kedge.test: sent [response_id=resp_1]")
    get_logger("kedge.test").info("run", call_id='x] [request_id="req_1')
    assert written.getvalue().endswith('run [call_id="x] [request_id=\\"req_1"]\n')
    logging.getLogger("openai").error("everything that was said")
    assert "said" not in written.getvalue()
    error = ValueError(f"bad\n{FORGED}\x1b[2K")
    get_logger("kedge.test").error("it failed", exc_info=error, call_id="call_1")
    *_, last, first, second = written.getvalue().splitlines()
    assert last.endswith("ERROR kedge.test: it failed [call_id=call_1]")
    assert (first, second) == ("    ValueError: bad", f"    {FORGED}\\x1b[2K")


FORGED = "2026-01-31T12:00:00.000Z INFO kedge.access: FAKE"
HOSTILE = (
    *(f"a{separator}{FORGED}" for separator in "\n\r\u2028\x85"),
    *("a\x1b[2K\x1b[1A", "a\x9b2K", "a\u202etxt", "a\ud800"),
)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_value_starts_a_line_or_controls_a_terminal(
    written: io.StringIO, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """External values such as paths and call ids are escaped in messages and fields."""
    # The records must not reach pytest's own handler: it cannot report a lone surrogate.
    monkeypatch.setattr(logging.getLogger("kedge"), "propagate", False)
    log_to_stderr("info", form, written)
    log = get_logger("kedge.test")
    for hostile in HOSTILE:
        log.info("a path: %s", hostile)
        log.info("a field", call_id=hostile)
    lines = written.getvalue().removesuffix("\n").split("\n")
    assert len(lines) == 2 * len(HOSTILE)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(FORGED) for line in lines)


def test_path_cannot_forge_a_line_of_the_access_log(written: io.StringIO) -> None:
    """One unauthenticated request is one line of the access log, for any path."""
    log_to_stderr("info", "text", written)
    with (
        serve() as server
    ):  # a line is written after its answer, so they are read when the server has stopped
        root = server.base_url.removesuffix("/v1")
        paths = ("/v1/x%0aFAKE", "/v1/x%0d%0aFAKE", "/v1/%1b%5b2KFAKE")
        answers = [httpx2.get(root + path, timeout=300) for path in paths]
    lines = [each for each in written.getvalue().split("\n") if "FAKE" in each]
    for answer, line in zip(answers, lines, strict=True):
        assert line.count(answer.headers["x-request-id"]) == 1
        assert " INFO kedge.access: GET /v1/" in line
        assert line.isprintable()


def test_bound_ids_apply_within_their_context(written: io.StringIO) -> None:
    """Bound ids are in records of all loggers and handlers, and fields of a record override them."""
    log_to_stderr("info", "json", written)
    with bind_fields(conversation_id="talk", response_id=""), bind_fields(call_id="call_1"):
        get_logger("kedge.test").info("one", call_id="call_2")
        logging.getLogger("kedge.plain").info("two")
    get_logger("kedge.test").info("three")
    one, two, three = parse_lines(written)
    assert (one["conversation_id"], one["call_id"]) == ("talk", "call_2")
    assert (two["conversation_id"], two["call_id"]) == ("talk", "call_1")
    assert "conversation_id" not in three
    assert "response_id" not in one
    handler = logging.StreamHandler(other := io.StringIO())
    handler.addFilter(ContextFilter())
    handler.setFormatter(logging.Formatter("%(message)s %(kedge)s"))
    logging.getLogger("kedge").addHandler(handler)
    with bind_fields(call_id="call_1"):
        logging.getLogger("kedge.plain").warning("x")
    assert "call_1" in other.getvalue()


async def test_every_record_of_a_run_has_its_ids(practice: Engine, written: io.StringIO) -> None:
    """Records have the conversation and turn ids, the response id once known, and the call id in a tool."""

    def note(text: str) -> str:
        """Note."""
        logging.getLogger("kedge.mine").info("noted")
        return text

    reset()
    log_to_stderr("trace", "json", written)
    async with open_store("sqlite://:memory:") as store:
        conversation = await Conversation.create(practice, store=store, tools=[note])
        turn = (await conversation.send("Please call note with text=x")).turn
    assert {labels[0][1] for labels in snapshot()["store_duration_seconds"]} >= {"read", "write"}
    lines = [
        each
        for each in parse_lines(written)
        if each["logger"].startswith(("kedge.engines", "kedge.mine"))
    ]
    assert {each["conversation_id"] for each in lines} == {conversation.id}
    assert all(each["turn_id"] for each in lines)
    (noted,) = [each for each in lines if each["message"] == "noted"]
    call = turn.blocks[1]
    assert noted["call_id"] == getattr(call, "call_id", None)
    assert noted["response_id"] == call.response_id
    answers = [
        each["response_id"] for each in lines if each["message"].startswith("request completed")
    ]
    assert len(set(answers)) == 2


async def test_concurrent_runs_have_separate_ids(practice: Engine, written: io.StringIO) -> None:
    """Ids are bound during one step of a stream, and not between two steps."""
    log_to_stderr("info", "json", written)
    with bind_fields(conversation_id="one"):
        one = practice.stream(Turn([user("Hello")]))
    with bind_fields(conversation_id="two"):
        two = practice.stream(Turn([user("Hello")]))
    async with one, two:
        first, second = True, True
        while first or second:
            first = await anext(one, None) is not None
            get_logger("kedge.between").info("mine")
            second = await anext(two, None) is not None
    lines = [each for each in parse_lines(written) if each["logger"] != "kedge.access"]
    between = [each for each in lines if each["logger"] == "kedge.between"]
    assert between
    assert all("conversation_id" not in each for each in between)
    records = {each["conversation_id"] for each in lines if each["logger"] == "kedge.engines"}
    assert records == {"one", "two"}
