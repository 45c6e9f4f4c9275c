"""Run unmodified agent frameworks on a strict server: bare, through `kedge.chain` and through `kedge proxy`.

Run by `check_clients.py` in a separate environment: none of these packages is a dependency. Each
framework resends its history, also one that is edited at random between requests. Its answers must be the
same in all three setups, the model must see the same context for each request, and with Kedge the bodies must
be smaller; for the edited histories, hardly larger than those of the best plan.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2
from edit_scripts import Step, describe_item, make_script, run_script, sum_best_bytes
from openai import AsyncOpenAI

import kedge
from app_thread import serve_app
from kedge.chaining.proxy import create_proxy_app
from kedge.testing import serve

SCRIPT = [
    Step("", 0.0, text)
    for text in (
        "My name is Ada.",
        "Please call add with a=2 and b=3",
        "What is my name?",
        "What is 4*5?",
        "What did I say first?",
    )
]
"""A conversation without edits."""
SEEDS, STEPS = 3, 20
MAX_SHARE = 1.10
"""The bytes that may be uploaded for an edit script, as a share of the best plan."""
Run = Callable[[Sequence[Step], str, bool], Coroutine[Any, Any, list[str]]]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_client(base_url: str, chained: bool) -> AsyncOpenAI:
    """Return the client that a framework gets."""
    client = AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0)
    return kedge.chain(client) if chained else client


async def run_bare(script: Sequence[Step], base_url: str, chained: bool) -> list[str]:
    """Run the `openai` client with a history in a list."""
    parameters = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    tool: Any = {"type": "function", "name": "add", "strict": False}
    tool["parameters"] = {"type": "object", "properties": parameters, "required": ["a", "b"]}
    async with make_client(base_url, chained) as client:

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            turn: list[Any] = [{"role": "user", "content": text}]
            while True:
                response = await client.responses.create(
                    model="practice", input=[*history, *turn], tools=[tool]
                )
                turn += [item.model_dump(exclude_none=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    output = str(add(**json.loads(call.arguments)))
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    turn.append({**result, "output": output})
                if not calls:
                    return response.output_text, turn

        return await run_script(script, send, _edit_item)


def _edit_item(turn: list[Any], text: str) -> list[Any]:
    return [{**turn[0], "content": text}, *turn[1:]]


async def run_pydantic_ai(script: Sequence[Step], base_url: str, chained: bool) -> list[str]:
    """Run pydantic-ai with `message_history`."""
    from pydantic_ai import Agent
    from pydantic_ai.messages import UserPromptPart
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def edit(turn: list[Any], text: str) -> list[Any]:
        parts = [
            replace(part, content=text) if isinstance(part, UserPromptPart) else part
            for part in turn[0].parts
        ]
        return [replace(turn[0], parts=parts), *turn[1:]]

    async with make_client(base_url, chained) as client:
        model = OpenAIResponsesModel("practice", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, tools=[add], system_prompt="Be brief.")

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            result = await agent.run(text, message_history=history or None)
            return result.output, result.new_messages()

        return await run_script(script, send, edit)


async def run_openai_agents(script: Sequence[Step], base_url: str, chained: bool) -> list[str]:
    """Run openai-agents with `to_input_list`."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    async with make_client(base_url, chained) as client:
        model = OpenAIResponsesModel("practice", openai_client=client)
        agent = Agent(name="a", instructions="Be brief.", model=model, tools=[function_tool(add)])

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            result = await Runner.run(agent, [*history, {"role": "user", "content": text}])
            return result.final_output, result.to_input_list()[len(history) :]

        return await run_script(script, send, _edit_item)


async def run_langchain(script: Sequence[Step], base_url: str, chained: bool) -> list[str]:
    """Run langchain-openai with an HTTP client."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    async with httpx2.AsyncClient() as http:
        if chained:
            kedge.chain(http)
        settings: Any = {"base_url": base_url, "api_key": "key", "use_responses_api": True}
        model = ChatOpenAI(model="practice", http_async_client=http, max_retries=0, **settings)
        bound = model.bind_tools([add])

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            turn: list[Any] = [HumanMessage(text)]
            while True:
                answer = await bound.ainvoke([SystemMessage("Be brief."), *history, *turn])
                turn.append(answer)
                if not answer.tool_calls:
                    return str(answer.text), turn
                turn += [
                    ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
                    for call in answer.tool_calls
                ]

        return await run_script(script, send, lambda turn, text: [HumanMessage(text), *turn[1:]])


async def run_agent_framework(script: Sequence[Step], base_url: str, chained: bool) -> list[str]:
    """Run agent-framework with a history of its messages; it chains the requests of a tool loop itself."""
    from agent_framework import Agent, Message
    from agent_framework.openai import OpenAIChatClient

    async with make_client(base_url, chained) as client:
        chat = OpenAIChatClient(model="practice", async_client=client)
        agent = Agent(client=chat, instructions="Be brief.", tools=[add])

        async def send(history: list[Any], text: str) -> tuple[str, list[Any]]:
            message = Message("user", [text])
            response = await agent.run([*history, message])
            return response.text, [message, *response.messages]

        return await run_script(
            script, send, lambda turn, text: [Message("user", [text]), *turn[1:]]
        )


FRAMEWORKS: dict[str, Run] = {
    "openai": run_bare,
    "pydantic-ai-slim": run_pydantic_ai,
    "openai-agents": run_openai_agents,
    "langchain-openai": run_langchain,
    "agent-framework-openai": run_agent_framework,
}


@contextmanager
def serve_proxy(upstream: str) -> Iterator[str]:
    """Run the proxy in a thread and yield its base URL."""
    with serve_app(create_proxy_app(upstream)) as url:
        yield f"{url}/v1"


def observe(run: Run, script: Sequence[Step], setup: str) -> tuple[list[str], list[Any], int, int]:
    """Return the texts, the contexts of the model, the bytes uploaded and those of the best plan."""
    with serve() as server:
        if setup == "proxy":
            with serve_proxy(server.base_url) as base_url:
                texts = asyncio.run(run(script, base_url, False))
        else:
            texts = asyncio.run(run(script, server.base_url, setup == "chain"))
        requests = [request for request in server.requests if request.context is not None]
        contexts = [[describe_item(item) for item in request.context or ()] for request in requests]
        size = sum(len(request.raw) for request in server.requests if request.method == "POST")
        return texts, contexts, size, sum_best_bytes(requests) if setup == "bare" else 0


def check_frameworks() -> Iterator[tuple[str, str, bool]]:
    """Run every framework in every setup; yield its package, what was run, and whether it passed."""
    scripts = [make_script(seed, STEPS) for seed in range(SEEDS)]
    for name, run in FRAMEWORKS.items():
        direct = observe(run, SCRIPT, "bare")
        edited = [observe(run, script, "bare") for script in scripts]
        best = sum(each[3] for each in edited)
        for setup in ("chain", "proxy"):
            texts, contexts, size, _ = observe(run, SCRIPT, setup)
            passed = (texts, contexts) == direct[:2] and size < direct[2]
            yield name, f"replayed through {setup}: {size / direct[2]:.2f} of the bytes", passed
            results = [observe(run, script, setup) for script in scripts]
            share = sum(each[2] for each in results) / best
            equal = [each[:2] for each in results] == [each[:2] for each in edited]
            what = f"edited at random through {setup}: {share:.2f} of the best plan's bytes"
            yield name, what, equal and share <= MAX_SHARE
