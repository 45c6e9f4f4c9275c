"""The eight programs with pydantic-ai."""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from program_tools import ADD, ARGUMENTS, BASE_URL, NOTES, REMOVE, TRIP, Stop, add, remove
from pydantic_ai import (
    Agent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelMessagesTypeAdapter,
    ModelRequest,
    Tool,
)
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

# Connection
MODEL: Any = OpenAIResponsesModel(
    "practice", provider=OpenAIProvider(base_url=BASE_URL, api_key="key")
)


# Programs
def remember() -> None:
    agent = Agent(MODEL)
    first = agent.run_sync("My name is Ada.")
    print(agent.run_sync("What is my name?", message_history=first.all_messages()).output)


def stream() -> None:
    for delta in Agent(MODEL).run_stream_sync("Count to 3").stream_text(delta=True):
        print(delta, end="")


def approve() -> None:
    tools = [Tool(add), Tool(remove, requires_approval=True)]
    agent: Any = Agent(MODEL, tools=tools, output_type=[str, DeferredToolRequests])
    history: Any = []
    for text in (ADD, REMOVE):
        result = agent.run_sync(text, message_history=history)
        if isinstance(result.output, DeferredToolRequests):
            decisions = DeferredToolResults()
            for call in result.output.approvals:
                print(f"Allow {call.tool_name}?")
                decisions.approvals[call.tool_call_id] = True
            result = agent.run_sync(
                message_history=result.all_messages(), deferred_tool_results=decisions
            )
        history = result.all_messages()
        print(result.output)


def parse() -> None:
    print(Agent(MODEL, output_type=Stop).run_sync(TRIP).output)


def edit() -> None:
    agent = Agent(MODEL)
    history: Any = agent.run_sync("My name is Ada.").all_messages()
    history[0].parts[0].content = "My name is Grace."
    print(agent.run_sync("What is my name?", message_history=history).output)


def fork() -> None:
    agent = Agent(MODEL)
    shared = agent.run_sync("My name is Ada.").all_messages()
    left = agent.run_sync("My ship is the Erebus.", message_history=deepcopy(shared))
    right = agent.run_sync("My ship is the Terror.", message_history=deepcopy(shared))
    for message in right.all_messages():
        if message not in left.all_messages():
            print(message.parts[-1].content)


def summarize() -> None:
    agent: Any = Agent(MODEL)
    history: Any = []
    for text in (*NOTES, "How many messages can you see?"):
        result = agent.run_sync(text, message_history=history)
        history = result.all_messages()
        if len(history) > 8:
            summary = agent.run_sync("Summarize the conversation.", message_history=history[:-4])
            history = [ModelRequest.user_text_prompt(summary.output), *history[-4:]]
    print(result.output)


def resume() -> None:
    file = Path("history.json")
    history = ModelMessagesTypeAdapter.validate_json(file.read_bytes()) if file.exists() else []
    result = Agent(MODEL).run_sync(ARGUMENTS[0], message_history=history)
    file.write_bytes(result.all_messages_json())
    print(result.output)


# End
globals()[sys.argv[1]]()
