"""A run with all logging enabled writes no planted secret.

Keys and passwords must be in no record of any logger, SDKs included; message content must be in none of
Kedge's own (an SDK at debug level logs complete requests: ``log_to_stderr`` never shows them).
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge import Chat, KedgeError, Turn, connect, system, user, with_middleware
from kedge.compaction import MessageLimitCompactor
from kedge.conversation import Conversation
from kedge.middleware import compact, guard, log, redact, repair, retry, system_prompt, tools
from kedge.observe import TRACE, JsonFormatter, TextFormatter
from kedge.store import open_store
from kedge.testing import serve

KEY = "sk-planted-key-0123456789"
WRONG_KEY = "sk-planted-wrong-9876543210"
HEADER = "planted-header-value-5555"
URL_PASSWORD = "planted-url-password-7777"
DSN_PASSWORD = "planted-dsn-password-8888"
USER_TEXT = "planted sentence about the harbour"
ARGUMENT = "planted-argument-1234"
RESULT = "planted-result-4321"
ERROR_TEXT = "planted-failure-words"
INSTRUCTIONS = "planted instructions for nobody"
KEYS = (KEY, WRONG_KEY, HEADER, URL_PASSWORD, DSN_PASSWORD)
CONTENT = (USER_TEXT, ARGUMENT, RESULT, ERROR_TEXT, INSTRUCTIONS)


class RecordingHandler(logging.Handler):
    """A handler that stores every record in all formats."""

    def __init__(self) -> None:
        super().__init__(TRACE)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the formatted record and the representation of its attributes."""
        output = f"{record.__dict__!r} {record.exc_info!r}"
        for text in (JsonFormatter().format(record), TextFormatter().format(record), output):
            self.lines.append((record.name, text))


@pytest.fixture
def logged() -> Iterator[RecordingHandler]:
    """Yield a handler that receives all records of all loggers, from TRACE on."""
    root = logging.getLogger()
    loggers = [logging.getLogger(name) for name in ("kedge", "openai", "httpx2", "httpcore2")]
    before = [(each, each.level) for each in (root, *loggers)]
    handler = RecordingHandler()
    root.addHandler(handler)
    for each in (root, *loggers):
        each.setLevel(TRACE)
    yield handler
    root.removeHandler(handler)
    for each, level in before:
        each.setLevel(level)


def secretive(text: str) -> str:
    """Return a confidential value."""
    return f"{RESULT} {text}"


def failing(text: str) -> str:
    """Fail with a confidential message."""
    raise RuntimeError(f"{ERROR_TEXT} {text} {KEY}")


async def run_conversation(address: str, key: str) -> None:
    """Run a conversation with tools, edits, a fallback, compaction, healing and failures."""
    model = f"responses:{address}#practice"
    settings = {"api_key": key, "default_headers": {"x-team": HEADER}, "max_retries": 0}
    async with connect(model, **settings) as engine:
        stack = with_middleware(
            engine,
            log(),
            compact(MessageLimitCompactor(6)),
            system_prompt(INSTRUCTIONS),
            repair(),
            guard(redact(r"\d{16}")),
            retry(2),
            tools(secretive, failing),
        )
        question = user(f"Please call secretive with text={ARGUMENT}")
        turn = await stack.run(Turn([user(USER_TEXT), question]))
        turn = await stack.run(turn.append(user(f"Please call failing with text={ARGUMENT}")))
        turn = turn.edit(turn.blocks[0].id, user(f"{USER_TEXT}, edited"))
        async with stack.stream(turn.append(user("And? 1234567812345678"))) as stream:
            async for _ in stream:
                pass
        for mode in ("conversation", "stateless"):
            await stack.run(stream.turn.append(user(USER_TEXT)), mode=mode)


async def run_store(address: str, folder: Path) -> None:
    """Store, undo and search a conversation, and open a store that cannot be opened."""
    async with open_store(f"sqlite:///{folder}/kept.db") as store:
        engine = connect(f"responses:{address}#practice", api_key=KEY)
        async with await Conversation.create(engine, store=store, title=USER_TEXT) as conversation:
            await conversation.send(USER_TEXT)
            await conversation.undo()
            await conversation.send(USER_TEXT)
            await store.search("planted")
            assert await store.verify() == []
    with pytest.raises(KedgeError) as exc_info:
        await open_store(f"postgresql://ada:{DSN_PASSWORD}@127.0.0.1:9/kedge?connect_timeout=2")
    logging.getLogger("kedge.mine").error("%s", exc_info.value, exc_info=exc_info.value)


async def test_run_logs_no_secret(logged: RecordingHandler, tmp_path: Path) -> None:
    """Client and server in one process log no secret, also when requests fail."""
    with serve(token=KEY) as server:
        await run_conversation(server.base_url, KEY)
        server.faults.set("status=500", times=1)
        await run_conversation(server.base_url, KEY)
        server.forget()
        async with connect(f"responses:{server.base_url}#practice", api_key=KEY) as engine:
            chat = Chat(engine)
            answer = await chat.chat_with_state(b"", system(INSTRUCTIONS), user(USER_TEXT))
            server.forget()
            answer = await chat.chat_with_state(answer.state, USER_TEXT)
            await chat.chat_with_state(answer.state[:-3] + USER_TEXT.encode(), USER_TEXT)
        await run_store(server.base_url, tmp_path)
        for address, key in (
            (server.base_url, WRONG_KEY),
            (server.base_url.replace("://", f"://user:{URL_PASSWORD}@"), WRONG_KEY),
            (f"http://user:{URL_PASSWORD}@127.0.0.1:9/v1", KEY),
        ):
            with pytest.raises(KedgeError) as exc_info:
                await run_conversation(address, key)
            logging.getLogger("kedge.mine").error("%s", exc_info.value)
    lines = [text for name, text in logged.lines if name.startswith("kedge")]
    assert len(lines) > 500
    assert {"kedge.engines", "kedge.run", "kedge.tools", "kedge.access", "kedge.conversation"} <= {
        name for name, _ in logged.lines
    }
    leaks = [(name, text) for name, text in logged.lines for key in KEYS if key in text]
    assert leaks == []
    quoted = [(name, text) for name, text in logged.lines for content in CONTENT if content in text]
    assert [each for each in quoted if each[0].startswith("kedge")] == []
