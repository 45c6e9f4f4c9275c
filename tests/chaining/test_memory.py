"""Tests of chaining on servers of an unknown kind, by the context that the model received."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import InternalServerError, OpenAI

from engines.fake_server import serve_handler
from engines.memory_server import ORDINARY, FakeClock, MemoryServer
from kedge.chaining import ChainReport, MemoryIndex, ResponseIndex, chain, chain_report
from kedge.chaining.chainer import Chainer
from kedge.chaining.client import _find_chainer  # pyright: ignore[reportPrivateUsage]
from kedge.chaining.observer import ResponseObserver
from kedge.evidence.server_evidence import BASE_COOLDOWN
from normalization import normalize_items

STREAMING = pytest.mark.parametrize("streaming", [True, False])


class Program:
    """A program that resends its history, and its server."""

    def __init__(self, server: MemoryServer, client: OpenAI, clock: FakeClock) -> None:
        self.server = server
        self.client = client
        self.clock = clock
        chainer = _find_chainer(client._client)  # pyright: ignore[reportPrivateUsage]
        assert isinstance(chainer, Chainer)
        chainer.clock = chainer.evidence.clock = clock
        self.history: list[Any] = []
        self.wrong = 0
        """The number of answers whose context differs from the history that the program sent."""

    def send(self, text: str, *, streaming: bool, **options: Any) -> Any:
        """Resend the history with a new message, and compare the context of the model with it."""
        self.history.append({"type": "message", "role": "user", "content": text})
        body: Any = {"model": "m", "input": self.history, **options}
        if streaming:
            stream = self.client.responses.create(**body, stream=True)
            response = [event for event in stream if event.type == "response.completed"][
                -1
            ].response
        else:
            response = self.client.responses.create(**body)
        self.wrong += normalize_items(self.server.contexts[-1]) != normalize_items(self.history)
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        return response

    def chat(self, count: int, *, streaming: bool) -> None:
        """Send messages of ordinary length."""
        for number in range(count):
            self.send(ORDINARY.format(number), streaming=streaming)

    @property
    def chained(self) -> list[bool]:
        """Whether each request was chained to a stored response."""
        return ["previous_response_id" in body for body in self.server.bodies]

    @property
    def report(self) -> ChainReport:
        return chain_report(self.client)


@contextmanager
def run_program(
    server: MemoryServer, index: ResponseIndex | None = None, **settings: Any
) -> Iterator[Program]:
    """Yield a program with a chained client of a server of an unknown kind."""
    clock = FakeClock()
    with (
        serve_handler(server.handle) as url,
        OpenAI(base_url=url, api_key="k", max_retries=0) as client,
    ):
        chain(client, index=index, **settings)
        yield Program(server, client, clock)


@STREAMING
@pytest.mark.parametrize("usage", ["honest", "llama"])
def test_an_honest_server_is_soon_trusted(streaming: bool, usage: str) -> None:
    """The server is trusted by its token counts, or for streams by its listed items; nothing is resent."""
    server = MemoryServer(usage=usage, hidden_prompt=300)
    with run_program(server) as program:
        program.chat(10, streaming=streaming)
        assert (program.wrong, len(server.bodies)) == (0, 10)
        assert all(program.chained[4:])
        assert program.report.healed == {}
        assert program.report.passed_through == {"new": 1, "untrusted": 1}


def test_a_failed_probe_is_repeated_after_a_doubling_delay() -> None:
    """A failed probe is repeated after a delay, which doubles, until it succeeds."""
    server = MemoryServer(lists=False)
    with run_program(server) as program:
        probes = 0
        fetch = server._fetch  # pyright: ignore[reportPrivateUsage]

        def count(path: str) -> Any:
            nonlocal probes
            probes += 1
            return fetch(path)

        server._fetch = count  # pyright: ignore[reportPrivateUsage]
        program.chat(4, streaming=True)
        assert probes == 1
        program.clock.now += BASE_COOLDOWN
        program.chat(2, streaming=True)
        assert probes == 2
        server.lists = True
        program.clock.now += 2 * BASE_COOLDOWN
        program.chat(2, streaming=True)
        assert program.chained[-1]


@STREAMING
def test_counts_that_contradict_a_probe_end_chaining(streaming: bool) -> None:
    """The server lists all items but gives the model none, so at most one streamed answer is wrong."""
    server = MemoryServer(cap=0)
    with run_program(server) as program:
        program.chat(8, streaming=streaming)
        assert program.wrong == program.report.lost == (1 if streaming else 0)
        assert sum(program.chained) == 1
        assert program.report.passed_through["forgot"] >= 4
        program.clock.now += BASE_COOLDOWN
        program.chat(3, streaming=True)
        assert program.wrong <= 1


@STREAMING
def test_the_maximum_length_of_a_chain_is_learned(streaming: bool) -> None:
    """The token count is short by the oldest exchange when the server truncates the chain."""
    server = MemoryServer(cap=4)
    with run_program(server) as program:
        program.chat(14, streaming=streaming)
        assert program.wrong == program.report.lost == (1 if streaming else 0)
        assert sum(program.chained) >= 4


@STREAMING
@pytest.mark.parametrize("usage", ["none", "constant", "new"])
@pytest.mark.parametrize("stores", [True, False])
def test_a_probe_decides_only_without_counts(usage: str, stores: bool, streaming: bool) -> None:
    """Storing is not using: counts that show no memory outweigh a list of the stored items."""
    server = MemoryServer(usage=usage, stores=stores)
    with run_program(server) as program:
        program.chat(6, streaming=streaming)
        assert program.wrong == 0
        assert (sum(program.chained) == 5) == (usage == "none" and stores)
        assert sum(program.chained) in (0, 1, 5)


@STREAMING
def test_server_that_never_stores_is_detected_once(streaming: bool) -> None:
    """One request at most is rejected, and the next chained one is sent only after the delay."""
    server = MemoryServer(stores=False, rejects_unknown=True)
    with run_program(server) as program:
        program.chat(8, streaming=streaming)
        assert program.wrong == 0
        rejected = sum(program.chained)
        assert rejected == (0 if streaming else 1)
        program.clock.now += BASE_COOLDOWN
        program.chat(2, streaming=streaming)
        assert sum(program.chained) == 2 * rejected


@STREAMING
def test_a_missing_response_of_a_trusted_server_concerns_its_own_conversation(
    streaming: bool,
) -> None:
    """With ``trust="always"`` each response is tried, and other conversations are chained as before."""
    server = MemoryServer(rejects_unknown=True)
    with run_program(server, trust="always") as program:
        histories: list[list[Any]] = []
        for name in ("One", "Two"):
            program.history = []
            program.send(name, streaming=streaming)
            program.chat(1, streaming=streaming)
            histories.append(program.history)
        for response_id in list(server.stored)[:2]:
            del server.stored[response_id]
        for history in (*histories, *histories):
            program.history = history
            program.chat(1, streaming=streaming)
        assert program.wrong == 0
        assert program.report.healed == {"rejected": 1}
        assert program.chained[4:] == [True, False, True, True, True]


def test_older_responses_are_not_tried_after_a_restart() -> None:
    """After a restart of the server, an edit that matches an older response causes no second rejection."""
    server = MemoryServer(rejects_unknown=True)
    with run_program(server, trust="always") as program:
        program.chat(4, streaming=False)
        server.restart()
        program.send("Five", streaming=False)
        assert program.report.healed == {"rejected": 1}
        program.clock.now += BASE_COOLDOWN
        del program.history[4:]
        program.send("Another way", streaming=False)
        assert program.report.healed == {"rejected": 1}
        assert program.wrong == 0


@STREAMING
def test_repeated_response_id_is_not_an_anchor(streaming: bool) -> None:
    """If a server reuses an id, neither of its two responses is used as an anchor."""
    server = MemoryServer(counter_ids=True)
    with run_program(server, trust="always") as program:
        program.send("One", streaming=streaming)
        one = list(program.history)
        server.restart()
        program.history = []
        program.send("Something else", streaming=streaming)
        other = list(program.history)
        for history in (one, other):
            program.history = history
            program.send("And?", streaming=streaming)
        assert program.wrong == 0
        assert not any(program.chained)
        assert program.report.passed_through["reused_ids"] == 2


@STREAMING
@pytest.mark.parametrize("echo", ["null", "late"])
def test_a_wrong_echo_disproves_the_context_at_any_time(streaming: bool, echo: str) -> None:
    """A wrong `previous_response_id` at the start or end of an answer disproves its context."""
    server = MemoryServer(echo=echo, stores=False)
    with run_program(server, trust="always") as program:
        program.send("One", streaming=streaming)
        program.send("Two", streaming=streaming)
        assert program.wrong == program.report.lost
        assert program.wrong == (1 if streaming and echo == "late" else 0)
        program.send("Three", streaming=streaming)
        assert program.wrong == program.report.lost
        assert "forgot" not in program.report.passed_through


def test_evidence_is_shared_through_the_index() -> None:
    """A second client chains at once, because the first one has proved the server."""
    server = MemoryServer(lists=False)
    index = MemoryIndex()
    with run_program(server, index) as program:
        program.chat(6, streaming=False)
        assert program.chained[-1]
        url = str(program.client.base_url)
        before = len(server.bodies)
        with OpenAI(base_url=url, api_key="k", max_retries=0) as other:
            second = Program(server, chain(other, index=index), program.clock)
            second.history = list(program.history)
            second.send("Short?", streaming=False)
            assert second.chained[before:] == [True]


def test_requests_chained_by_a_program_are_evidence() -> None:
    """The token counts of a program's own chained requests prove a server that cannot be probed."""
    server = MemoryServer(lists=False)
    with run_program(server) as program:
        first = program.send(ORDINARY.format(1), streaming=True)
        items: Any = [{"type": "message", "role": "user", "content": "More?"}]
        stream = program.client.responses.create(
            model="m", input=items, previous_response_id=first.id, stream=True
        )
        second = [event for event in stream if event.type == "response.completed"][-1].response
        program.history += [*items, *(item.model_dump() for item in second.output)]
        program.send("And more?", streaming=True)
        assert program.chained == [False, True, True]
        assert program.wrong == 0


def test_a_response_that_cannot_be_judged_is_withheld() -> None:
    """A response with unknown or broken compression, or without JSON, causes a resend."""
    for encoding, data in (("br", b"x"), ("gzip", b"not gzip"), ("", b"not json")):
        observer = ResponseObserver({"content-encoding": encoding}, "resp_1", must_judge=True)
        observer.feed(data)
        assert observer.finish() is None
        assert (observer.verdict, observer.reason) == ("resend", "unproven")
    observer = ResponseObserver({"content-encoding": "deflate"}, "resp_1", must_judge=True)
    observer.feed(zlib.compress(b'{"id": "resp_2", "status": "completed", "output": []}'))
    assert observer.finish() is not None
    assert observer.verdict == "waiting"  # for the judgment


@STREAMING
def test_a_server_that_fails_chained_requests_gets_full_ones(streaming: bool) -> None:
    """After two errors in a row requests are sent as written for a while, and later chained again."""
    server = MemoryServer()
    with run_program(server) as program:
        program.chat(6, streaming=streaming)
        assert program.chained[-1]
        server.fails_chained = True
        for _ in range(2):
            with pytest.raises(InternalServerError):
                program.send(ORDINARY.format(6), streaming=streaming)
            program.history.pop()
        program.chat(3, streaming=streaming)
        assert program.chained[-3:] == [False] * 3
        assert program.report.passed_through["fails"] == 3
        program.clock.now += BASE_COOLDOWN
        with pytest.raises(InternalServerError):
            program.send(ORDINARY.format(7), streaming=streaming)
        program.history.pop()
        program.clock.now += BASE_COOLDOWN  # the second pause is longer
        program.chat(1, streaming=streaming)
        server.fails_chained = False
        program.clock.now += BASE_COOLDOWN
        program.chat(3, streaming=streaming)
        assert program.chained[-4:] == [False, True, True, True]
        assert program.wrong == 0
