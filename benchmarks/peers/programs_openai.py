"""The eight programs with the bare client."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from program_tools import ADD, ARGUMENTS, BASE_URL, NOTES, REMOVE, TRIP, Stop, add, remove
from pydantic import TypeAdapter

# Connection
client = OpenAI(base_url=BASE_URL, api_key="key")
MODEL = "practice"


# Programs
def remember() -> None:
    first = client.responses.create(model=MODEL, input="My name is Ada.")
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id
    )
    print(second.output_text)


def stream() -> None:
    with client.responses.stream(model=MODEL, input="Count to 3") as answer:
        for event in answer:
            if event.type == "response.output_text.delta":
                print(event.delta, end="")


def approve() -> None:
    functions: dict[str, Any] = {"add": add, "remove": remove}
    tools: Any = [
        {
            "type": "function",
            "name": name,
            "description": function.__doc__,
            "parameters": TypeAdapter(function).json_schema(),
            "strict": False,
        }
        for name, function in functions.items()
    ]
    last: str | None = None
    for text in (ADD, REMOVE):
        new: Any = text
        while new:
            response = client.responses.create(
                model=MODEL, input=new, tools=tools, previous_response_id=last
            )
            last, new = response.id, []
            for call in response.output:
                if call.type == "function_call":
                    if call.name == "remove":
                        print(f"Allow {call.name}?")
                    output = str(functions[call.name](**json.loads(call.arguments)))
                    new.append(
                        {
                            "type": "function_call_output",
                            "call_id": call.call_id,
                            "output": output,
                        }
                    )
        print(response.output_text)


def parse() -> None:
    print(client.responses.parse(model=MODEL, input=TRIP, text_format=Stop).output_parsed)


def edit() -> None:
    history: list[Any] = [{"role": "user", "content": "My name is Ada."}]
    history += client.responses.create(model=MODEL, input=history).output
    history[0]["content"] = "My name is Grace."
    history.append({"role": "user", "content": "What is my name?"})
    print(client.responses.create(model=MODEL, input=history).output_text)


def fork() -> None:
    shared: list[Any] = [{"role": "user", "content": "My name is Ada."}]
    first = client.responses.create(model=MODEL, input=shared)
    shared.append({"role": "assistant", "content": first.output_text})
    branches: list[Any] = []
    for text in ("My ship is the Erebus.", "My ship is the Terror."):
        branch = [*shared, {"role": "user", "content": text}]
        answer = client.responses.create(model=MODEL, input=branch).output_text
        branches.append([*branch, {"role": "assistant", "content": answer}])
    for message in branches[1]:
        if message not in branches[0]:
            print(message["content"])


def summarize() -> None:
    history: list[Any] = []
    for text in (*NOTES, "How many messages can you see?"):
        history.append({"role": "user", "content": text})
        response = client.responses.create(model=MODEL, input=history)
        history += response.output
        if len(history) > 8:
            ask = {"role": "user", "content": "Summarize the conversation."}
            summary = client.responses.create(model=MODEL, input=[*history[:-4], ask])
            history[:-4] = [{"role": "user", "content": summary.output_text}]
    print(response.output_text)


def resume() -> None:
    file = Path("last.txt")
    last = file.read_text() if file.exists() else None
    response = client.responses.create(model=MODEL, input=ARGUMENTS[0], previous_response_id=last)
    file.write_text(response.id)
    print(response.output_text)


# End
globals()[sys.argv[1]]()
