"""Test the evidence about a server's memory, and the decisions by it in engines and chained clients."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
from openai import OpenAI
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import (
    complete_response,
    connect_to,
    json_response,
    message_item,
    serve_handler,
    stream_response,
)
from engines.memory_server import ORDINARY, FakeClock, MemoryServer
from engines.runs import talk
from for_each import for_each
from kedge.chaining import chain, chain_report, chainer
from kedge.engines import ResponsesEngine
from kedge.errors import KedgeError
from kedge.events import Event, Outcome, Usage
from kedge.events.run import Healed, ModeChanged, ServerForgot
from kedge.evidence.judge import EvidenceRegistry
from kedge.evidence.server_evidence import (
    BASE_COOLDOWN,
    CONTRADICTION_SECONDS,
    HOLD_SECONDS,
    MAX_COOLDOWN,
    MAX_HOLD_SECONDS,
    MAX_OVERHEADS,
    KnownServer,
    ReasoningEvidence,
    ServerEvidence,
    Trust,
    read_identity,
)
from kedge.evidence.tokens import SentTokens
from kedge.providers import connect
from kedge.testing import TestServer, serve
from kedge.turns import Turn, assistant, system, user
from planning.recorded_turns import add_response, make_plan

STREAMING = pytest.mark.parametrize("streaming", [True, False])
KNOWN = KnownServer(remembers=True)
ANSWER = (
    "A keel is the lowest part of a ship. It runs along the middle from the bow to the stern and "
    "carries the frames. In a sailing boat it also keeps the hull from drifting sideways, and its "
    "weight keeps the boat upright. A kedge is a small anchor with which a crew pulls a ship off the "
    "ground: it is carried out in a boat, dropped, and the ship is hauled towards it. Sailors have used "
    "both for centuries, and both words are still in common use today among people who go to sea."
)
"""A visible answer of about 100 tokens."""

Counts = Sequence[tuple[int, int, int]]
"""Input, output and reasoning tokens of one response after the other."""
SENTENCES = "This is a sentence of the message. " * 6
RECORDED: Counts = ((20, 950, 832), (137, 12, 0))
"""Counts of a hosted model for an answer and for "Thank you." after it."""


class CountingServer:
    """A server that reports given counts, and remembers."""

    def __init__(self, counts: Counts) -> None:
        self.counts = list(counts)
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: Request) -> Response:
        """Answer with the next counts."""
        if request.method == "GET":
            return json_response({"detail": "Not Found"}, 404)
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        given, made, hidden = self.counts[min(number, len(self.counts)) - 1]
        thought = {"type": "reasoning", "id": f"rs_{number}", "summary": []}
        message = message_item(ANSWER)
        usage = {
            "input_tokens": given,
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": hidden},
            "total_tokens": given + made,
        }
        output = [thought, message] if hidden else [message]
        parent = {"previous_response_id": body.get("previous_response_id")}
        response = complete_response(f"resp_{number}", *output, usage=usage, **parent)
        return stream_response(response) if body.get("stream") else json_response(response)


def connect_engine(url: str, **settings: Any) -> ResponsesEngine:
    """Return an engine for a server at this address."""
    engine = connect(f"responses:{url}#practice", max_retries=0, **settings)
    assert isinstance(engine, ResponsesEngine)
    return engine


def find_losses(events: list[Event]) -> list[Event]:
    """Return the events that report a loss."""
    return [each for each in events if isinstance(each, Healed | ServerForgot | ModeChanged)]


@pytest.fixture(autouse=True)
def known_hosts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make the servers of chained clients known ones while the set has their host."""
    hosts: set[str] = set()
    monkeypatch.setattr(chainer, "find_known_host", lambda _: KNOWN if hosts else None)
    return hosts


async def send_texts(
    server: CountingServer | MemoryServer,
    *texts: str,
    streaming: bool,
    hours: Sequence[int] = (),
    **settings: Any,
) -> list[list[type[Event]]]:
    """Send texts, each with instructions that contain one of these hours, and return the losses after each."""
    reports: list[list[type[Event]]] = []
    async with connect_to(server.handle, clock=FakeClock(), **settings) as engine:
        turn = Turn()
        for text, hour in zip_longest(texts, hours):
            lead = [] if hour is None else [system(f"It is {hour} o'clock.")]
            turn = Turn([*lead, *turn.body], data=turn.data)
            turn, events = await talk(engine, turn, text, streaming=streaming)
            reports.append([type(each) for each in find_losses(events)])
    return reports


def are_chained(server: CountingServer | MemoryServer) -> list[bool]:
    """Return whether each request continued a response."""
    return ["previous_response_id" in body for body in server.bodies]


@STREAMING
async def test_recorded_counts_of_a_known_provider_are_no_loss(streaming: bool) -> None:
    """Not all of the output that a hosted model reports is in its next prompt, which is no loss."""
    server = CountingServer(RECORDED)
    texts = ("What is a keel?", "Thank you.", "And?")
    assert await send_texts(server, *texts, streaming=streaming, known_server=KNOWN) == [[]] * 3
    assert are_chained(server) == [False, True, True]


@STREAMING
def test_recorded_counts_are_no_loss_in_a_chained_client(
    streaming: bool, known_hosts: set[str]
) -> None:
    """A chained client judges the same counts as an engine does."""
    known_hosts.add("127.0.0.1")
    server = CountingServer(RECORDED)
    with (
        serve_handler(server.handle) as url,
        OpenAI(base_url=url, api_key="k", max_retries=0) as client,
    ):
        chain(client)
        history: list[Any] = []
        for text in ("What is a keel?", "Thank you."):
            history.append({"type": "message", "role": "user", "content": text})
            answer = client.responses.create(model="m", input=history, stream=streaming)
            for _ in answer if streaming else ():
                pass
            history += [{"role": "assistant", "content": ANSWER}]
        report = chain_report(client)
    assert (report.chained, report.healed, report.lost) == (1, {}, 0)


@STREAMING
@pytest.mark.parametrize(
    ("counts", "text", "reports"),
    [
        # A count that lacks a part of the context is believed when the next one does, too.
        ((900, 800, 700, 700), f"{ANSWER} " * 8, [[], [], [Healed, ModeChanged]]),
        # A count that the request alone explains shows the loss of the whole context.
        ((900, 12, 900), "What is a keel?", [[], [Healed, ModeChanged]]),
    ],
)
async def test_a_shortfall_of_a_known_provider_must_repeat(
    counts: Sequence[int], text: str, reports: list[list[type[Event]]], streaming: bool
) -> None:
    """The loss of a part of the context is believed at its second sign, and that of all of it at once."""
    server = CountingServer([(count, 100, 0) for count in counts])
    texts = (text, *["Thank you."] * (len(reports) - 1))
    assert await send_texts(server, *texts, streaming=streaming, known_server=KNOWN) == reports
    assert len(server.bodies) == len(counts)


def find_bodies(server: TestServer) -> list[dict[str, Any]]:
    """Return the bodies of all requests for a response."""
    return [dict(each.body) for each in server.requests if each.method == "POST"]


@STREAMING
@pytest.mark.parametrize("hours", [(), range(6)], ids=["same", "changed"])
async def test_losses_of_a_trusted_server_are_only_reported(
    hours: Sequence[int], streaming: bool
) -> None:
    """With ``trust="always"`` a count causes no second request: each loss is reported, and a new chain starts.

    The count of an anchor with other instructions cannot be compared, but the context has a minimum of its own.
    """
    server = MemoryServer(stores=False)
    texts = [ORDINARY.format(n) if n % 2 or not hours else SENTENCES * 4 for n in range(6)]
    settings: Any = {"streaming": streaming, "hours": hours, "trust": "always"}
    assert await send_texts(server, *texts, **settings) == [[], [ServerForgot]] * 3
    assert are_chained(server) == [False, True] * 3


@STREAMING
async def test_losses_of_a_known_server_are_found_while_the_instructions_change(
    streaming: bool,
) -> None:
    """A count that is too small for the texts of the context shows the loss, and everything is sent from then on."""
    server = MemoryServer(stores=False)
    settings: Any = {"streaming": streaming, "hours": range(4), "known_server": KNOWN}
    reports = await send_texts(server, *[SENTENCES * 4] * 4, **settings)
    # An answer that was shown is only reported.
    loss = [ServerForgot] if streaming else [Healed, ModeChanged]
    assert reports == [[], loss, [ModeChanged], [ModeChanged]]
    assert are_chained(server)[:3] == [False, True, False]


@STREAMING
def test_losses_are_reported_to_programs_whose_instructions_change(
    streaming: bool, known_hosts: set[str]
) -> None:
    """A chained client compares the count with the texts of the complete input of its program."""
    known_hosts.add("127.0.0.1")
    server = MemoryServer(stores=False)
    with (
        serve_handler(server.handle) as url,
        OpenAI(base_url=url, api_key="k", max_retries=0) as client,
    ):
        chain(client)
        history: list[Any] = []
        for hour in range(3):
            history.append({"type": "message", "role": "user", "content": SENTENCES * 4})
            answer: Any = client.responses.create(
                model="m", input=history, stream=streaming, instructions=f"It is {hour} o'clock."
            )
            text = "".join(getattr(each, "delta", "") for each in answer) if streaming else ""
            history += [{"role": "assistant", "content": text or answer.output_text}]
        report = chain_report(client)
    assert report.lost + sum(report.healed.values()) == 1


@STREAMING
@pytest.mark.parametrize("settings", [{"trust": "always"}, {"known_server": KNOWN}])
@pytest.mark.parametrize("usage", ["honest", "none", "apart"])
async def test_a_change_of_the_instructions_is_no_loss(
    streaming: bool, usage: str, settings: dict[str, Any]
) -> None:
    """A trusted or known server that remembers is not accused, however it counts, and is chained on each time."""
    server = MemoryServer(usage=usage)
    settings = {"streaming": streaming, "hours": range(4), **settings}
    assert await send_texts(server, *["x" * 3_000] * 4, **settings) == [[]] * 4
    assert are_chained(server) == [False, True, True, True]


@STREAMING
@pytest.mark.parametrize(
    "settings", [{"known_server": KNOWN}, {"trust": "always", "hours": range(4)}]
)
async def test_a_line_of_one_character_is_no_loss(
    settings: dict[str, Any], streaming: bool
) -> None:
    """Such a text has fewer tokens than any other of its length, with and without a change of the instructions."""
    server = MemoryServer()
    assert await send_texts(server, *["-" * 3_000] * 4, streaming=streaming, **settings) == [[]] * 4
    assert are_chained(server) == [False, True, True, True]


@STREAMING
async def test_a_proven_server_keeps_other_conversations(streaming: bool) -> None:
    """A conversation whose responses are missing again and again does not stop the others."""
    server, clock = MemoryServer(rejects_unknown=True), FakeClock()
    async with connect_to(server.handle, known_server=KNOWN, clock=clock) as engine:
        lost, _ = await talk(engine, Turn(), "One", streaming=streaming)
        kept, _ = await talk(engine, Turn(), "Two", streaming=streaming)
        _, keep = server.stored
        for number in range(4):
            server.stored = {keep: server.stored[keep]}
            lost, _ = await talk(engine, lost, f"Line {number}", streaming=streaming)
        server.bodies.clear()
        _, events = await talk(engine, kept, "And?", streaming=streaming)
    assert find_losses(events) == []
    assert "previous_response_id" in server.bodies[-1]


async def test_a_plan_that_depends_on_a_probe_says_so() -> None:
    """A new engine does not advise against a server that its request then proves."""
    with serve() as server:
        async with connect_engine(server.base_url) as engine:
            turn = await engine.run(Turn([user("Hello")]))
        async with connect_engine(server.base_url) as engine:
            turn = turn.append(user("And?"))
            plan = engine.plan(turn)
            assert plan.conditional
            assert "trust='always'" not in plan.explain()
            assert "may change" in plan.explain()
            checked = await engine.probe_and_plan(turn)
            assert (bool(checked.anchor), checked.conditional) == (True, False)
            assert len(find_bodies(server)) == 1
            await engine.run(turn)
        assert find_bodies(server)[-1]["previous_response_id"] == checked.previous_response_id


def test_the_delay_after_a_loss_doubles_up_to_an_hour() -> None:
    """The delay doubles with each loss, is reset after a proof, and has no end if chaining is rejected."""
    evidence, now = ServerEvidence(), 0.0
    delays: list[float] = []
    for _ in range(8):
        evidence.record_loss(now)
        delays.append(evidence.retry_at - now)
        assert evidence.find_doubt(now) == "forgot"
        now = evidence.retry_at
        assert evidence.find_doubt(now) == ""
    assert delays == [BASE_COOLDOWN * 2**n for n in range(6)] + [MAX_COOLDOWN] * 2
    evidence.record_remembered(1)
    evidence.record_loss(now)
    assert evidence.retry_at - now == BASE_COOLDOWN
    evidence.doubt = "unsupported"
    assert evidence.find_doubt(10 * MAX_COOLDOWN) == "unsupported"


def test_evidence_does_not_change_with_every_response() -> None:
    """Evidence is saved when it changes, and a growing chain on a proven server changes nothing."""
    evidence = ServerEvidence(proof="count")
    before = evidence.to_json()
    for depth in range(1, 5):
        evidence.record_remembered(depth)
    assert evidence.to_json() == before
    evidence.record_silent_loss(0.0, 3, partial=False)
    evidence.record_remembered(2)
    now = evidence.hold_until
    assert (evidence.must_hold(2, now), evidence.must_hold(3, now)) == (False, True)
    evidence.record_remembered(3)
    assert not evidence.must_hold(4, now)


def test_a_second_silent_loss_resets_the_verified_depth() -> None:
    """What was verified after the first loss must be verified again after the second one."""
    evidence = ServerEvidence(proof="count")
    evidence.record_silent_loss(0.0, 4, partial=False)
    evidence.record_remembered(3)
    evidence.record_silent_loss(1.0, 2, partial=False)
    evidence.record_remembered(1)
    now = evidence.hold_until
    assert (evidence.must_hold(1, now), evidence.must_hold(2, now)) == (False, True)


def test_hold_time_outlasts_a_proof() -> None:
    """One connection may remember while another forgets, so a proof does not end the hold time."""
    evidence, now = ServerEvidence(proof="count"), 1_000.0
    assert not evidence.must_hold(3, now)
    evidence.record_silent_loss(now, 2, partial=False)
    evidence.record_remembered(3)
    assert evidence.proof
    assert evidence.must_hold(1, now + HOLD_SECONDS - 1)
    assert not evidence.must_hold(3, now + HOLD_SECONDS)
    evidence.record_silent_loss(now + HOLD_SECONDS, 2, partial=False)
    assert evidence.hold_until == now + 3 * HOLD_SECONDS
    for _ in range(20):
        evidence.record_silent_loss(now, 2, partial=True)
    assert evidence.hold_until == now + MAX_HOLD_SECONDS
    now += 3 * MAX_HOLD_SECONDS
    evidence.record_silent_loss(now, 2, partial=True)
    assert evidence.hold_until == now + HOLD_SECONDS


def test_repeated_errors_of_chained_requests_are_a_doubt_until_one_is_answered() -> None:
    """A later error prolongs no doubt, and a chained answer ends it; other doubts remain."""
    evidence = ServerEvidence(proof="count")
    evidence.record_error(0.0)
    assert evidence.find_doubt(0.0) == ""
    evidence.record_error(0.0)
    evidence.record_error(1.0)
    assert (evidence.find_doubt(1.0), evidence.retry_at) == ("fails", BASE_COOLDOWN)
    evidence.record_chained()
    assert (evidence.find_doubt(1.0), evidence.errors, evidence.proof) == ("", 0, "count")
    evidence.record_loss(0.0)
    evidence.record_chained()
    evidence.identify(KNOWN, "identity")
    assert (evidence.find_doubt(1.0), evidence.proof) == ("forgot", "")


def test_the_lowest_overhead_is_retained_for_each_setting() -> None:
    """A later count with more tokens beside the blocks is no reason to expect more; the oldest settings are dropped."""
    evidence, sent = ServerEvidence(), SentTokens(8, 10, 36, 1, settings=0)
    for tokens in (50, 40, 60):
        evidence.record_full_send(Usage(tokens), sent)
    assert evidence.overheads == {0: 40 - sent.lower}
    for settings in (*range(1, MAX_OVERHEADS), 0, MAX_OVERHEADS):
        evidence.record_full_send(Usage(40), sent._replace(settings=settings))
    assert evidence.overheads.keys() == {0, *range(2, MAX_OVERHEADS + 1)}


def test_an_unstored_response_to_an_unstored_request_is_no_evidence() -> None:
    """A server stores no responses if it says so of one that it was asked to store."""
    evidence = ReasoningEvidence()
    for stored in (False, True):
        outcome = Outcome("completed", stored=False)
        evidence.record(outcome, requested=False, rejected=False, stored=stored)
        assert evidence.stores is not stored


def judge_next(
    trust: Trust, answer: Outcome, *, echoes: bool = False
) -> tuple[str, ServerEvidence]:
    """Judge an answer to a request that continues a response; return the reason to reject it, and the evidence."""
    turn = add_response(Turn([user("Hello")]), "R1").append(user("And?"))
    check = EvidenceRegistry(trust, FakeClock()).check("here", "m", streaming=False)
    check.evidence.echoes = echoes
    check.set_request(make_plan(turn), {"model": "m"})
    return check.judge(answer).reason, check.evidence


def test_a_missing_echo_is_a_loss_unless_the_server_is_always_trusted() -> None:
    """A server that usually names the previous response, and does not, has not used it."""
    answer = Outcome("completed", (assistant("Hi"),), "R2", usage=Usage(900, output_tokens=9))
    assert judge_next("earned", answer)[0] == ""
    assert judge_next("earned", answer, echoes=True)[0] == "forgot"
    reason, evidence = judge_next("always", answer, echoes=True)
    assert reason == ""
    assert not evidence.overheads  # its count includes the context


def test_an_answer_to_an_unplanned_request_names_no_other_response() -> None:
    """The server cannot name another context than that of a request which continues nothing."""
    check = EvidenceRegistry("earned", FakeClock()).check("here", "m", streaming=False)
    assert not check.names_another(Outcome("completed", response_id="R1", echoed=True))
    check.set_request(make_plan(add_response(Turn([user("Hello")]), "R1").append(user("And?"))), {})
    assert check.names_another(Outcome("completed", response_id="R2", echoed=True))


@for_each(
    ("headers", "name"),
    [
        ({"kedge-server": "kedge/0.2", "server": "nginx"}, "kedge"),
        ({"kedge-server": "kedge; encryption=none"}, "kedge; encryption=none"),
        ({"server": "SMG/1.4 (linux)"}, "smg"),
        ({}, ""),
    ],
)
def test_a_server_is_identified_by_its_headers(headers: dict[str, str], name: str) -> None:
    """The header of Kedge precedes the usual one, of which only the name counts."""
    assert read_identity(headers) == name


def test_a_repeated_id_concerns_all_models_of_an_endpoint() -> None:
    """Responses from before the repetition are not relied on, whichever model made them."""
    memory = EvidenceRegistry("earned", lambda: 5.0)
    check = memory.check("here", "m", streaming=False)
    issued = [memory.record_issued(check, name, known=False) for name in ("R1", "R2", "", "", "R1")]
    assert issued == [False, False, False, False, True]
    others = [memory.check(scope, "n", streaming=True) for scope in ("here", "there")]
    assert [each.evidence.not_before for each in others] == [5.0, 0.0]
    assert [each.doubt for each in (check, *others)] == ["reused_ids", "", ""]


class EvidenceTable(dict[str, Any]):
    """A store of evidence, which may be closed."""

    is_closed = False

    async def load_evidence(self, key: str) -> Any:
        """Return the evidence of a key."""
        return self.get(key)

    async def save_evidence(self, key: str, form: Any) -> None:
        """Save the evidence of a key."""
        if self.is_closed:
            raise KedgeError("closed")
        self[key] = form


async def test_evidence_is_in_the_newest_store() -> None:
    """What could not be stored is stored later, also in another store; the loss is not forgotten for what is there."""
    memory, first, second = (
        EvidenceRegistry("earned", lambda: 0.0),
        EvidenceTable(),
        EvidenceTable(),
    )
    check = memory.check("scope", "m", streaming=False)
    await memory.attach(first, check)
    check.evidence.record_loss(0.0)
    first.is_closed = True
    await memory.save(check)
    first.is_closed = False
    await memory.save(check)
    [(key, form)] = first.items()
    assert form["doubt"] == "forgot"
    second[key] = {"proof": "count"}
    await memory.attach(second, check)
    await memory.save(check)
    assert second == first


def test_evidence_round_trips_through_json() -> None:
    """Overheads and the learned depth are restored; unknown members and invalid evidence are ignored."""
    evidence = ServerEvidence(proof="count", max_depth=7, overheads={5: 12}, matched=40)
    restored = ServerEvidence()
    restored.restore({**evidence.to_json(), "unknown": 1})
    assert restored == evidence
    restored.restore({"proof": 3})
    assert restored == evidence


def test_a_missing_response_of_a_proven_server_concerns_its_own_conversation() -> None:
    """Only if responses of two conversations are missing, in spite of new ones, nothing is chained."""
    evidence = ServerEvidence(proof="count")
    evidence.record_missing(10.0, created_at=5.0, conversation="a")
    assert evidence.find_doubt(11.0, "a") == ""
    evidence.record_missing(20.0, created_at=15.0, conversation="a")
    assert evidence.find_doubt(21.0, "a") == "never_stores"
    assert evidence.find_doubt(21.0, "b") == ""
    assert evidence.proof
    evidence.record_missing(22.0, created_at=21.0, conversation="b")
    assert evidence.find_doubt(23.0, "c") == "never_stores"
    assert not evidence.proof


def test_responses_that_were_lost_together_count_once() -> None:
    """A server that lost its memory once is chained on again at once, in every conversation."""
    evidence = ServerEvidence(proof="count")
    for conversation in "abc":
        evidence.record_missing(10.0, created_at=5.0, conversation=conversation)
    assert [evidence.find_doubt(11.0, each) for each in "abcd"] == [""] * 4


def test_an_unproven_server_without_a_response_is_not_tried_in_any_conversation() -> None:
    """A server that never showed that it remembers is treated as not storing after one rejection."""
    evidence = ServerEvidence()
    evidence.record_missing(10.0, created_at=5.0, conversation="a")
    assert evidence.find_doubt(11.0, "b") == "never_stores"


def test_counts_outweigh_a_probe() -> None:
    """After a loss on a server that lists its items, no probe is believed for a day."""
    evidence = ServerEvidence()
    evidence.record_probe(agrees=True, now=0.0)
    assert (evidence.stores, evidence.proof) == (True, "")
    evidence.record_silent_loss(1.0, 2, partial=False)
    assert not evidence.stores
    assert evidence.next_probe_at == 1.0 + CONTRADICTION_SECONDS


def test_a_failed_probe_is_no_loss() -> None:
    """A server that lists nothing, or other items, may still prove its memory by its counts."""
    evidence = ServerEvidence()
    for agrees in (None, False):
        evidence.record_probe(agrees=agrees, now=0.0)
        assert evidence.find_doubt(0.0) == ""
    assert evidence.next_probe_at == 2 * BASE_COOLDOWN


NUMBERED = "\n".join(f"{number}. Haul in the line (and make it fast)." for number in range(1, 30))
"""A text with fewer tokens than one with the same words and spaces in place of line breaks."""


@STREAMING
async def test_messages_with_lists_are_no_loss(streaming: bool) -> None:
    """A server that counts tokens as Kedge does has not forgotten a context with lines of a list."""
    with serve() as server:
        server.set_answers(ANSWER)
        async with connect(f"responses:{server.base_url}#practice") as engine:
            turn, events = Turn(), list[Event]()
            for text in (*[ANSWER] * 3, *[NUMBERED] * 3):
                turn, received = await talk(engine, turn, text, streaming=streaming)
                events += received
            plan = engine.plan(turn.append(user("Continue.")), streaming=streaming)
    assert not [each for each in events if isinstance(each, ModeChanged | ServerForgot)]
    assert plan.previous_response_id
