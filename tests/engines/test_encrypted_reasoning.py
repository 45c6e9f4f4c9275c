"""Encrypted reasoning is requested for stored responses too, so that a full send does not lose it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import complete_response, connect_to, json_response, message_item
from engines.memory_server import EvidenceStore
from for_each import for_each
from kedge import Chat, connect
from kedge.engines import ResponsesEngine
from kedge.errors import EngineError
from kedge.evidence.server_evidence import KnownServer
from kedge.testing import serve
from kedge.turns import Turn, tool_result, user

INCLUDE = "reasoning.encrypted_content"
KNOWN: dict[str, Any] = {"known_server": KnownServer()}
ERRORS: list[tuple[int, dict[str, Any]]] = [
    (400, {"message": "Encrypted content is not supported with this model.", "param": "include"}),
    (400, {"message": "bad request"}),
    (422, {"message": "unprocessable"}),
    (500, {"message": "internal error"}),
]


@dataclass
class ReasoningServer:
    """A server whose answers contain reasoning, encrypted if requested; it stores responses unless told not to."""

    rejects: tuple[int, dict[str, Any]] | None = None
    stores: bool = True
    calls: bool = False
    chains: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    known: set[str] = field(default_factory=set[str])
    broken: bool = False

    async def respond(self, request: Request) -> Response:
        if request.method != "POST":
            return json_response({"error": {"message": "no"}}, 404)
        body = await request.json()
        if request.url.path.endswith("/conversations"):
            return json_response({"id": "conv_1"})
        self.bodies.append(body)
        asked = INCLUDE in body.get("include", ())
        if self.broken or (self.rejects and asked):
            status, error = self.rejects or (500, {"message": "broken"})
            return json_response({"error": error}, status)
        parent = body.get("previous_response_id")
        if parent and not self.chains:
            error = {"message": "previous_response_id is not supported"}
            return json_response({"error": error}, 400)
        if parent and parent not in self.known:
            error = {"message": "gone", "code": "previous_response_not_found"}
            return json_response({"error": error}, 400)
        name = f"resp_{len(self.bodies)}"
        self.known.add(name)
        stored = self.stores and body.get("store") is not False
        sealed = {"encrypted_content": f"sealed {name}"} if asked else {}
        thought = {"type": "reasoning", "id": f"rs_{name}", "summary": [], **sealed}
        answer = message_item(name, f"msg_{name}")
        if self.calls and body["input"][-1]["type"] != "function_call_output":
            answer = {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}"}
            answer |= {"name": "f", "arguments": "{}"}
        members = {"store": stored, "previous_response_id": parent}
        return json_response(complete_response(name, thought, answer, **members))

    @property
    def asked(self) -> list[bool]:
        """Whether each request asked for encrypted reasoning."""
        return [INCLUDE in body.get("include", ()) for body in self.bodies]

    def reasoning(self, index: int = -1) -> list[str]:
        """The encrypted reasoning in the input of a request."""
        items = self.bodies[index]["input"]
        return [item["encrypted_content"] for item in items if item["type"] == "reasoning"]


def open_engine(server: ReasoningServer, **settings: Any) -> Any:
    return connect_to(server.respond, **{"trust": "always", **settings})


async def send(engine: ResponsesEngine, turn: Turn, text: str = "Hello", **options: Any) -> Turn:
    return await engine.run(turn.append(user(text)), streaming=False, **options)


@for_each(
    ("given", "settings", "sends", "asked"),
    [
        # A known host and another server are asked at once.
        ({}, KNOWN, [{}], [True]),
        ({}, {}, [{}, {}], [True, True]),
        # A server without encrypted reasoning costs one more request for each model.
        *(
            ({"rejects": each}, KNOWN, [{}, {}, {"model": "n"}], [True, False, False, True, False])
            for each in ERRORS
        ),
        # A request that is repeated for another reason does not ask for what was just rejected.
        ({"rejects": ERRORS[0], "chains": False}, {}, [{}, {}], [True, False, False, False]),
        # Without healing, nothing is requested that might have to be repeated.
        ({}, KNOWN, [{"heal": False}, {"heal": True}, {"heal": False}], [False, True, True]),
    ],
)
async def test_encrypted_reasoning_is_requested_until_it_is_rejected(
    given: Any, settings: Any, sends: list[Any], asked: list[bool]
) -> None:
    """A rejected request is repeated once without it, which is remembered per model."""
    server = ReasoningServer(**given)
    async with open_engine(server, **settings) as engine:
        turn = Turn()
        for options in sends:
            turn = await send(engine, turn, **options)
    assert server.asked == asked


async def test_a_failure_that_is_not_about_reasoning_is_not_remembered() -> None:
    """If the repeated request fails as well, the next one asks again."""
    server = ReasoningServer(broken=True)
    async with open_engine(server, **KNOWN) as engine:
        with pytest.raises(EngineError):
            await send(engine, Turn())
        server.broken = False
        await send(engine, Turn())
    assert server.asked == [True, False, True]


@for_each(
    ("error", "settings"),
    [
        ((400, {"message": "too hot", "param": "temperature", "code": "invalid_value"}), {}),
        # The object may contain the request already.
        (ERRORS[3], {"mode": "conversation"}),
    ],
)
async def test_a_request_is_not_repeated_in_vain_or_twice(error: Any, settings: Any) -> None:
    """The error is raised if another member was rejected, or if a repetition might be the second one."""
    server = ReasoningServer(rejects=error)
    async with open_engine(server, **KNOWN, **settings) as engine:
        with pytest.raises(EngineError, match=error[1]["message"]):
            await send(engine, Turn())
    assert server.asked == [True]


@pytest.mark.parametrize("mode", ["chained", "conversation"])
@pytest.mark.parametrize("streaming", [True, False])
async def test_the_first_reasoning_of_an_unknown_server_survives_its_loss(
    mode: Any, streaming: bool
) -> None:
    """The first request asks, so a full send after the server has forgotten has the reasoning of its answer."""
    server = ReasoningServer()
    async with open_engine(server, mode=mode) as engine:
        turn = await engine.run(Turn([user("One")]), streaming=streaming)
        server.known.clear()
        mode = "stateless" if mode == "conversation" else mode
        await engine.run(turn.append(user("Two")), mode=mode, streaming=streaming)
    assert server.asked[0]
    assert server.reasoning() == ["sealed resp_1"]


@pytest.mark.parametrize("sdk", [False, True])
@pytest.mark.parametrize("status", [400, 422, 500])
async def test_an_error_of_a_kedge_server_is_not_about_reasoning(status: int, *, sdk: bool) -> None:
    """It says in the header of the error whether it encrypts, and never rejects the member: nothing is repeated."""
    with serve() as server:
        server.faults.set(f"status={status}")
        engine: Any = connect(f"responses:{server.base_url}#practice", max_retries=0)
        if sdk:
            client = AsyncOpenAI(base_url=server.base_url, api_key="any", max_retries=0)
            engine = ResponsesEngine("practice", make_client=lambda: client, scope="test")
        async with engine:
            with pytest.raises(EngineError):
                await engine.run(Turn([user("One")]))
    assert len(server.requests) == 1


async def test_evidence_is_shared_by_engines_with_one_store() -> None:
    """A rejection that one engine has seen is not repeated by another one of the same scope."""
    server, store = ReasoningServer(rejects=ERRORS[1]), EvidenceStore()
    for _ in range(2):
        settings = {"evidence_store": store, "scope": "s", **KNOWN}
        async with open_engine(server, **settings) as engine:
            await send(engine, Turn())
    assert server.asked == [True, False, False]


async def test_a_kedge_server_that_does_not_encrypt_is_not_asked_again() -> None:
    """Its header says so: the other requests, and another engine with the same store, do not ask."""
    store = EvidenceStore()
    turn = Turn()
    with serve(encrypts=False) as server:
        for _ in range(2):
            address = f"responses:{server.base_url}#practice"
            async with connect(address, scope="s", evidence_store=store) as engine:
                turn = Turn()
                for text in ("Think: One", "Think: Two", "What did I say first?"):
                    turn = await engine.run(turn.append(user(text)))
        asked = [INCLUDE in (each.body.get("include") or ()) for each in server.requests]
    assert not any(asked[1:])
    assert turn[-1].text == 'You said first: "Think: One"'


async def test_a_kedge_server_that_encrypts_again_is_asked_again() -> None:
    """What its header says now is used, and not what it said before."""
    store = EvidenceStore()
    for encrypts in (False, True):
        with serve(encrypts=encrypts) as server:
            address = f"responses:{server.base_url}#practice"
            async with connect(address, scope="s", evidence_store=store) as engine:
                turn = Turn()
                for text in ("Think: One", "Think: Two"):
                    turn = await engine.run(turn.append(user(text)))
            last = server.requests[-1].body
            assert (INCLUDE in (last.get("include") or ())) is encrypts


async def test_reasoning_that_a_server_can_no_longer_decrypt_is_left_out() -> None:
    """A server that has lost the package that encrypts is sent the request once more, without reasoning."""
    with serve() as server, serve(encrypts=False) as other:
        engines = [
            connect(f"responses:{each.base_url}#practice", scope="s", mode="stateless")
            for each in (server, other)
        ]
        turn = Turn()
        for engine, text in zip(engines, ("Think: One", "What did I say first?"), strict=True):
            async with engine:
                turn = await engine.run(turn.append(user(text)))
    assert turn[-1].text == 'You said first: "Think: One"'
    assert [block.kind for block in turn if block.kind == "reasoning"] == ["reasoning"]


async def test_a_full_send_after_a_loss_has_the_reasoning() -> None:
    """After the server has lost its responses, everything is sent with reasoning, unless it was edited."""
    server = ReasoningServer()
    async with open_engine(server, **KNOWN) as engine:
        turn = await send(engine, await send(engine, Turn(), "One"), "Two")
        server.known.clear()
        await send(engine, turn, "Three")
        assert server.reasoning() == ["sealed resp_1", "sealed resp_2"]
        server.known.clear()
        edited = turn.edit(turn.blocks[3].id, user("Two, edited"))
        await send(engine, edited, "Three")
        assert server.reasoning() == ["sealed resp_1"]
        edited = turn.edit(turn.blocks[0].id, user("One, edited"))
        await send(engine, edited, "Three")
        assert server.reasoning() == []


async def test_a_server_that_does_not_store_unasked_has_no_data_retention() -> None:
    """From the answer with ``store: false`` on, requests are stateless and carry their reasoning."""
    server = ReasoningServer(stores=False)
    async with open_engine(server) as engine:
        turn = await send(engine, await send(engine, Turn(), "One"), "Two")
        await send(engine, turn, "Three")
        assert engine.plan(turn.append(user("Three"))).mode == "stateless"
    assert [body.get("store") for body in server.bodies] == [None, False, False]
    assert server.asked == [True, True, True]
    assert server.reasoning() == ["sealed resp_1", "sealed resp_2"]


async def test_a_tool_loop_resends_the_reasoning_of_its_call() -> None:
    """The request with the result has the call directly after its reasoning."""
    server = ReasoningServer(stores=False, calls=True)
    async with open_engine(server, **KNOWN) as engine:
        turn = await send(engine, Turn(), "Call f.")
        await engine.run(turn.append(tool_result("call_resp_1", "1")), streaming=False)
    kinds = [item["type"] for item in server.bodies[-1]["input"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    assert server.reasoning() == ["sealed resp_1"]


@pytest.mark.parametrize("keep", [True, False])
async def test_chat_may_leave_reasoning_on_the_server(keep: bool) -> None:
    """``Chat(keep_reasoning=False)`` does not request it, and its states are smaller."""
    server = ReasoningServer()
    async with open_engine(server, **KNOWN) as engine:
        chat = Chat(engine, keep_reasoning=keep)
        answer = await chat.chat_with_state(None, "Hello")
        chat.plan(answer.state, "Again")
    assert server.asked == [keep]
    assert (b"sealed" in answer.state) is keep
