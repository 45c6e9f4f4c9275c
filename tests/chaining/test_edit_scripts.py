"""Run random edit scripts with the `openai` client and compare contexts, answers and bytes."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

from chaining.proxy.running import serve_proxy
from clients.edit_scripts import Step, describe_item, make_script, run_script, sum_best_bytes
from kedge.chaining import chain
from kedge.testing import serve

ADD: Any = {
    "type": "function",
    "name": "add",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
MAX_SHARE = 1.10
"""The maximum number of uploaded bytes, relative to the best plan."""


def edit(turn: list[Any], text: str) -> list[Any]:
    """Return a turn with a different user text."""
    return [{**turn[0], "content": text}, *turn[1:]]


async def play(script: list[Step], base_url: str, chained: bool) -> list[str]:
    """Run a script with the bare client, alternating between streams and complete answers."""
    async with AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0) as client:
        if chained:
            chain(client)

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            turn: list[Any] = [{"role": "user", "content": text}]
            while True:
                body: Any = {"model": "practice", "input": [*history, *turn], "tools": [ADD]}
                if len(history) % 2:
                    async with client.responses.stream(**body) as events:
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**body)
                turn += [item.model_dump(exclude_none=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    arguments = json.loads(call.arguments)
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    turn.append({**result, "output": str(arguments["a"] + arguments["b"])})
                if not calls:
                    return response.output_text, turn

        return await run_script(script, send, edit)


def observe(script: list[Step], setup: str) -> tuple[list[str], list[list[str]], int, int]:
    """Return the texts, the contexts of the model, the bytes uploaded and those of the best plan."""
    with serve() as server:
        if setup == "proxy":
            with serve_proxy(server.base_url, trust="earned") as url:
                texts = asyncio.run(play(script, f"{url}/v1", chained=False))
        else:
            texts = asyncio.run(play(script, server.base_url, chained=setup == "chain"))
        requests = [request for request in server.requests if request.context is not None]
        contexts = [[describe_item(item) for item in request.context or ()] for request in requests]
        uploaded = sum(len(request.raw) for request in server.requests)
        best = sum_best_bytes(requests) if setup == "bare" else 0
        return texts, contexts, uploaded, best


def test_edit_scripts_are_coherent_and_close_to_the_best_plan() -> None:
    """Contexts and answers through `chain` and through the proxy are the same as without them."""
    script = make_script(0, 20)
    texts, contexts, uploaded, best = observe(script, "bare")
    assert best < uploaded / 2
    for setup in ("chain", "proxy"):
        result = observe(script, setup)
        assert result[:2] == (texts, contexts), setup
        assert result[2] <= MAX_SHARE * best, setup
