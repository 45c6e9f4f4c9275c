"""Agent frameworks, unmodified, on a strict server: bare, through `kedge.chain` and through `kedge proxy`.

Run by `check_clients.py`, in an environment of its own: none of these packages is a dependency. Each
framework replays its history. Its answers must be the same in all three ways, the model must see the same
context for each request, and with Kedge the bodies must be smaller.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn
from openai import AsyncOpenAI

import kedge
from kedge.proxy import create_proxy_app
from kedge.server.uvicorn_server import bind
from kedge.testing import serve

MESSAGES = [
    "My name is Ada.",
    "Please call add with a=2 and b=3",
    "What is my name?",
    "What is 4*5?",
    "What did I say first?",
]
Run = Callable[[str, bool], Coroutine[Any, Any, list[str]]]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_client(base_url: str, chained: bool) -> AsyncOpenAI:
    """The client that a framework gets."""
    client = AsyncOpenAI(base_url=base_url, api_key="key", max_retries=0)
    return kedge.chain(client, trust="always") if chained else client


async def run_bare(base_url: str, chained: bool) -> list[str]:
    """The `openai` client, with a history kept by hand."""
    parameters = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    tool: Any = {"type": "function", "name": "add", "strict": False}
    tool["parameters"] = {"type": "object", "properties": parameters, "required": ["a", "b"]}
    history: list[Any] = []
    texts: list[str] = []
    async with make_client(base_url, chained) as client:
        for message in MESSAGES:
            history.append({"role": "user", "content": message})
            while True:
                response = await client.responses.create(
                    model="practice", input=history, tools=[tool]
                )
                history += response.output
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    output = str(add(**json.loads(call.arguments)))
                    result = {"type": "function_call_output", "call_id": call.call_id}
                    history.append({**result, "output": output})
                if not calls:
                    break
            texts.append(response.output_text)
    return texts


async def run_pydantic_ai(base_url: str, chained: bool) -> list[str]:
    """pydantic-ai with `message_history`."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with make_client(base_url, chained) as client:
        model = OpenAIResponsesModel("practice", provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, tools=[add], system_prompt="Be brief.")
        history: Any = None
        texts: list[str] = []
        for message in MESSAGES:
            result = await agent.run(message, message_history=history)
            history = result.all_messages()
            texts.append(result.output)
    return texts


async def run_openai_agents(base_url: str, chained: bool) -> list[str]:
    """openai-agents with `to_input_list`."""
    from agents import (
        Agent,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    async with make_client(base_url, chained) as client:
        model = OpenAIResponsesModel("practice", openai_client=client)
        agent = Agent(name="a", instructions="Be brief.", model=model, tools=[function_tool(add)])
        items: list[Any] = []
        texts: list[str] = []
        for message in MESSAGES:
            result = await Runner.run(agent, [*items, {"role": "user", "content": message}])
            items = result.to_input_list()
            texts.append(result.final_output)
    return texts


async def run_langchain(base_url: str, chained: bool) -> list[str]:
    """langchain-openai, which takes an HTTP client."""
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    async with httpx2.AsyncClient() as http:
        if chained:
            kedge.chain(http, trust="always")
        settings: Any = {"base_url": base_url, "api_key": "key", "use_responses_api": True}
        model = ChatOpenAI(model="practice", http_async_client=http, max_retries=0, **settings)
        bound = model.bind_tools([add])
        history: list[Any] = [SystemMessage("Be brief.")]
        texts: list[str] = []
        for message in MESSAGES:
            history.append(HumanMessage(message))
            while True:
                answer = await bound.ainvoke(history)
                history.append(answer)
                if not answer.tool_calls:
                    break
                history += [
                    ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
                    for call in answer.tool_calls
                ]
            texts.append(str(answer.text))
    return texts


async def run_agent_framework(base_url: str, chained: bool) -> list[str]:
    """agent-framework with a history of its messages; in a tool loop it chains by itself."""
    from agent_framework import Agent, Message
    from agent_framework.openai import OpenAIChatClient

    async with make_client(base_url, chained) as client:
        chat = OpenAIChatClient(model="practice", async_client=client)
        agent = Agent(client=chat, instructions="Be brief.", tools=[add])
        history: list[Any] = []
        texts: list[str] = []
        for message in MESSAGES:
            history.append(Message("user", [message]))
            response = await agent.run(history)
            history += response.messages
            texts.append(response.text)
    return texts


FRAMEWORKS: dict[str, Run] = {
    "openai": run_bare,
    "pydantic-ai-slim": run_pydantic_ai,
    "openai-agents": run_openai_agents,
    "langchain-openai": run_langchain,
    "agent-framework-openai": run_agent_framework,
}


@contextmanager
def serve_proxy(upstream: str) -> Iterator[str]:
    """Run the proxy in a thread; give its base URL."""
    with bind("127.0.0.1", 0) as listener:
        started = threading.Event()

        class Server(uvicorn.Server):
            async def main_loop(self) -> None:
                started.set()
                await super().main_loop()

        app = create_proxy_app(upstream, trust="always")
        server = Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            if not started.wait(60):
                raise RuntimeError("the proxy did not start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(60)


def observe(run: Run, way: str) -> tuple[list[str], list[Any], int]:
    """The texts a framework shows, the contexts that the model saw, and the bytes uploaded."""
    with serve() as server:
        if way == "proxy":
            with serve_proxy(server.base_url) as base_url:
                texts = asyncio.run(run(base_url, False))
        else:
            texts = asyncio.run(run(server.base_url, way == "chain"))
        requests = [request for request in server.requests if request.context is not None]
        contexts = [[_comparable(item) for item in request.context or ()] for request in requests]
        return texts, contexts, sum(len(request.raw) for request in requests)


def _comparable(item: Any) -> str:
    """What a model sees of an item: ids differ between runs, and members may come in any order."""
    seen = {k: v for k, v in item.items() if k not in ("id", "call_id", "status")}
    if "arguments" in seen:
        seen["arguments"] = json.loads(seen["arguments"])
    return json.dumps(seen, sort_keys=True)


def check_frameworks() -> Iterator[tuple[str, str, bool]]:
    """Run every framework in every way; yield its package, what was run, and whether it passed."""
    for name, run in FRAMEWORKS.items():
        bare = observe(run, "bare")
        for way in ("chain", "proxy"):
            texts, contexts, size = observe(run, way)
            passed = (texts, contexts) == bare[:2] and size < bare[2]
            yield name, f"replayed through {way}: {size / bare[2]:.2f} of the bytes", passed
