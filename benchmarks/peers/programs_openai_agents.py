"""The eight programs with openai-agents."""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from program_tools import ADD, ARGUMENTS, BASE_URL, NOTES, REMOVE, TRIP, Stop, add, remove

# Connection
set_tracing_disabled(True)
MODEL: Any = OpenAIResponsesModel(
    "practice", openai_client=AsyncOpenAI(base_url=BASE_URL, api_key="key")
)


# Programs
def remember() -> None:
    agent, session = Agent(name="a", model=MODEL), SQLiteSession("a")
    Runner.run_sync(agent, "My name is Ada.", session=session)
    print(Runner.run_sync(agent, "What is my name?", session=session).final_output)


def stream() -> None:
    async def run() -> None:
        result = Runner.run_streamed(Agent(name="a", model=MODEL), "Count to 3")
        async for event in result.stream_events():
            if (
                event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ):
                print(event.data.delta, end="")

    asyncio.run(run())


def approve() -> None:
    tools = [function_tool(add), function_tool(remove, needs_approval=True)]
    agent, session = Agent(name="a", model=MODEL, tools=tools), SQLiteSession("a")
    for text in (ADD, REMOVE):
        result = Runner.run_sync(agent, text, session=session)
        while result.interruptions:
            state = result.to_state()
            for item in result.interruptions:
                print(f"Allow {item.name}?")
                state.approve(item)
            result = Runner.run_sync(agent, state, session=session)
        print(result.final_output)


def parse() -> None:
    agent = Agent(name="a", model=MODEL, output_type=Stop)
    print(Runner.run_sync(agent, TRIP).final_output)


def edit() -> None:
    agent = Agent(name="a", model=MODEL)
    history: Any = Runner.run_sync(agent, "My name is Ada.").to_input_list()
    history[0]["content"] = "My name is Grace."
    history.append({"role": "user", "content": "What is my name?"})
    print(Runner.run_sync(agent, history).final_output)


def fork() -> None:
    agent = Agent(name="a", model=MODEL)
    shared: Any = Runner.run_sync(agent, "My name is Ada.").to_input_list()
    left = Runner.run_sync(agent, [*shared, {"role": "user", "content": "My ship is the Erebus."}])
    right = Runner.run_sync(agent, [*shared, {"role": "user", "content": "My ship is the Terror."}])
    for item in right.to_input_list():
        if item not in left.to_input_list():
            content = item["content"]
            print(content if isinstance(content, str) else content[0]["text"])


def summarize() -> None:
    agent = Agent(name="a", model=MODEL)
    history: Any = []
    for text in (*NOTES, "How many messages can you see?"):
        result = Runner.run_sync(agent, [*history, {"role": "user", "content": text}])
        history = result.to_input_list()
        if len(history) > 8:
            ask = {"role": "user", "content": "Summarize the conversation."}
            summary = Runner.run_sync(agent, [*history[:-4], ask]).final_output
            history = [{"role": "user", "content": summary}, *history[-4:]]
    print(result.final_output)


def resume() -> None:
    agent, session = Agent(name="a", model=MODEL), SQLiteSession("ada", "agent.db")
    print(Runner.run_sync(agent, ARGUMENTS[0], session=session).final_output)


# End
globals()[sys.argv[1]]()
