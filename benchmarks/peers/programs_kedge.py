"""The eight programs with Kedge."""

import sys
from typing import Any

from program_tools import ADD, ARGUMENTS, BASE_URL, NOTES, REMOVE, TRIP, Stop, add, remove

from kedge import Conversation, tool
from kedge.compaction import SummarizingCompactor
from kedge.tools import Allow

# Connection
MODEL = f"responses:{BASE_URL}#practice"


# Programs
def remember() -> None:
    with Conversation(MODEL).sync as chat:
        chat.send("My name is Ada.")
        print(chat.send("What is my name?").text)


def stream() -> None:
    with Conversation(MODEL).sync as chat, chat.stream("Count to 3") as answer:
        for delta in answer.text_deltas():
            print(delta, end="")


def approve() -> None:
    def ask(call: Any) -> Allow:
        print(f"Allow {call.name}?")
        return Allow()

    tools = [tool(add, approval=False), remove]
    with Conversation(MODEL, tools=tools, approve=ask).sync as chat:
        for text in (ADD, REMOVE):
            print(chat.send(text).text)


def parse() -> None:
    with Conversation(MODEL).sync as chat:
        print(chat.send(TRIP, output=Stop).output)


def edit() -> None:
    with Conversation(MODEL).sync as chat:
        chat.send("My name is Ada.")
        chat.edit(chat.turn[0].id, "My name is Grace.")
        print(chat.send("What is my name?").text)


def fork() -> None:
    with Conversation(MODEL).sync as left:
        left.send("My name is Ada.")
        right = left.fork()
        left.send("My ship is the Erebus.")
        right.send("My ship is the Terror.")
        for block in left.diff(right).added:
            print(block.text)


def summarize() -> None:
    with Conversation(MODEL, compactor=SummarizingCompactor(120)).sync as chat:
        for text in NOTES:
            chat.send(text)
        print(chat.send("How many messages can you see?").text)


def resume() -> None:
    with Conversation(MODEL, store="agent.db", id="ada").sync as chat:
        print(chat.send(ARGUMENTS[0]).text)


# End
globals()[sys.argv[1]]()
