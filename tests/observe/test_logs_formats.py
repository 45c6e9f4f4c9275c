"""Log records on their way out: as lines for people, or as JSON with ids as members."""

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from kedge import EngineError, Turn, connect, user, with_middleware
from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.errors import InvalidSetting
from kedge.middleware import tools
from kedge.observe import ContextFilter, bind_fields, get_logger, log_to_stderr, reset, snapshot
from kedge.store import open_store
from kedge.testing import serve


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What reaches the standard error; the loggers are as before afterwards."""
    root = logging.getLogger("kedge")
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def practice() -> AsyncIterator[Engine]:
    """An engine on a real server."""
    with serve() as server:
        async with connect(f"responses:{server.base_url}#practice") as engine:
            yield engine


def parse_lines(written: io.StringIO) -> list[dict[str, str]]:
    """The lines as JSON."""
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_json_is_one_object_a_line(written: io.StringIO) -> None:
    """Time, level, logger and message, the ids beside them, and an exception as one member."""
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


def test_text_is_one_line_with_the_ids_at_its_end(written: io.StringIO) -> None:
    """For people."""
    log_to_stderr("info", "text", written)
    get_logger("kedge.test").info("sent", response_id="resp_1")
    get_logger("kedge.test").debug("never")
    (line,) = written.getvalue().splitlines()
    assert line.endswith("INFO kedge.test: sent [response_id=resp_1]")


FORGED = "2026-01-31T12:00:00.000Z INFO kedge.access: FAKE"
HOSTILE = (
    f"a\n{FORGED}",
    f"a\r{FORGED}",
    f"a\u2028{FORGED}",
    f"a\x85{FORGED}",
    "a\x1b[2K\x1b[1A",
    "a\x9b2K",
    "a\u202etxt",
    "a\ud800",
)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
def test_no_value_starts_a_line_or_controls_a_terminal(
    written: io.StringIO, form: str, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths, tool names and call ids come from outside: in a message or a field they stay text."""
    # The records must not reach pytest's own handler: a report with half a character cannot be sent.
    monkeypatch.setattr(logging.getLogger("kedge"), "propagate", False)
    log_to_stderr("info", form, written)
    log = get_logger("kedge.test")
    log.info("a path: %s", hostile)
    log.info("a field", call_id=hostile)
    lines = written.getvalue().removesuffix("\n").split("\n")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(FORGED) for line in lines)


def test_a_field_cannot_add_another_field(written: io.StringIO) -> None:
    """A value with a space or a bracket is quoted."""
    log_to_stderr("info", "text", written)
    get_logger("kedge.test").info("run", call_id='x] [request_id="req_1')
    assert written.getvalue().endswith('run [call_id="x] [request_id=\\"req_1"]\n')


def test_lines_of_a_traceback_are_indented(written: io.StringIO) -> None:
    """The message of an exception may quote foreign text: none of its lines looks like a record."""
    log_to_stderr("info", "text", written)
    error = ValueError(f"bad\n{FORGED}\x1b[2K")
    get_logger("kedge.test").error("it failed", exc_info=error, call_id="call_1")
    first, *rest = written.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("ERROR kedge.test: it failed [call_id=call_1]")
    assert rest == ["    ValueError: bad", f"    {FORGED}\\x1b[2K"]


@pytest.mark.parametrize("path", ["/v1/x%0aFAKE", "/v1/x%0d%0aFAKE", "/v1/%1b%5b2KFAKE"])
def test_a_path_cannot_forge_a_line_of_the_access_log(written: io.StringIO, path: str) -> None:
    """One request is one line, whatever its path holds; no token is needed to try."""
    log_to_stderr("info", "text", written)
    with serve() as server:
        answer = httpx2.get(server.base_url.removesuffix("/v1") + path, timeout=300)
    lines = [line for line in written.getvalue().split("\n") if "FAKE" in line]
    assert len(lines) == 1
    assert lines[0].count(answer.headers["x-request-id"]) == 1
    assert " INFO kedge.access: GET /v1/" in lines[0]
    assert lines[0].isprintable()


def test_only_our_own_loggers_are_shown(written: io.StringIO) -> None:
    """An SDK's log of details holds whole requests: it is not ours to show."""
    log_to_stderr("trace", "text", written)
    logging.getLogger("openai").error("everything that was said")
    assert written.getvalue() == ""


def test_second_call_replaces_handler(written: io.StringIO) -> None:
    """A record is never written twice."""
    log_to_stderr("info", "text", written)
    log_to_stderr("info", "json", written)
    get_logger("kedge.test").info("once")
    assert len(parse_lines(written)) == 1


@pytest.mark.parametrize(("level", "form"), [("loud", "text"), ("info", "xml")])
def test_a_wrong_word_is_refused_with_the_right_ones(level: str, form: str) -> None:
    """The message lists what there is."""
    with pytest.raises(InvalidSetting, match="use one of"):
        log_to_stderr(level, form)


def test_bound_ids_hold_below_and_end_with_their_block(written: io.StringIO) -> None:
    """Plain loggers have them too; what is given with a record wins."""
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


def test_a_handler_of_ones_own_can_have_the_ids(written: io.StringIO) -> None:
    """``Ids`` is a filter that puts them on every record."""
    handler = logging.StreamHandler(written)
    handler.addFilter(ContextFilter())
    handler.setFormatter(logging.Formatter("%(message)s %(kedge)s"))
    logging.getLogger("kedge").addHandler(handler)
    with bind_fields(call_id="call_1"):
        logging.getLogger("kedge.plain").warning("x")
    assert "call_1" in written.getvalue()


async def test_every_record_of_a_run_has_its_ids(practice: Engine, written: io.StringIO) -> None:
    """Conversation and turn from the start, the response once it is known, the call in its tool."""

    def note(text: str) -> str:
        """Note."""
        logging.getLogger("kedge.mine").info("noted")
        return text

    log_to_stderr("trace", "json", written)
    engine = with_middleware(practice, tools(note))
    with bind_fields(conversation_id="talk"):
        turn = await engine.run(Turn([user("Please call note with text=x")]))
    lines = [each for each in parse_lines(written) if each["logger"] != "kedge.access"]
    assert {each["conversation_id"] for each in lines} == {"talk"}
    assert all(each["turn_id"] for each in lines)
    (noted,) = [each for each in lines if each["message"] == "noted"]
    call = turn.blocks[1]
    assert noted["call_id"] == getattr(call, "call_id", None)
    assert noted["response_id"] == call.metadata["response_id"]
    answers = [each["response_id"] for each in lines if each["message"] == "answer completed"]
    assert len(set(answers)) == 2


async def test_stored_conversation_is_bound_to_records(
    practice: Engine, written: io.StringIO
) -> None:
    """Every record of its engine has its id, and what the store took is measured."""
    reset()
    log_to_stderr("debug", "json", written)
    async with await open_store("sqlite://:memory:") as store:
        talking = await Conversation.create(store, practice)
        await talking.send("Hello")
    records = [each for each in parse_lines(written) if each["logger"].startswith("kedge.engines")]
    assert {each["conversation_id"] for each in records} == {talking.id}
    assert {labels[0][1] for labels in snapshot()["store_duration_seconds"]} >= {"read", "write"}


async def test_two_runs_at_once_keep_their_ids_apart(
    practice: Engine, written: io.StringIO
) -> None:
    """Ids are bound for one step of a stream; between two steps the caller's own hold."""
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


async def test_failure_is_logged_with_ids(written: io.StringIO) -> None:
    """A server that is not there."""
    log_to_stderr("error", "json", written)
    async with connect("responses:http://127.0.0.1:9/v1#x", max_retries=0) as engine:
        with bind_fields(conversation_id="talk"), pytest.raises(EngineError):
            await engine.run(Turn([user("Hello")]))
    (line,) = parse_lines(written)
    assert line["conversation_id"] == "talk"
    assert "Unreachable" in line["message"]
