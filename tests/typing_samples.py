"""Calls with misspelled options, each of which must be an error of the type checker that ``make types`` runs.

A comment accepts the error of its call, and is itself an error where the call has none.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import Any

from kedge import Chat, Conversation, Turn, connect, user


async def misspell_option_of_send() -> Any:
    return await Conversation("practice").send("Hello", temprature=0.5)  # pyright: ignore[reportCallIssue]


async def misspell_option_of_conversation() -> Any:
    return Conversation("practice", tols=[])  # pyright: ignore[reportCallIssue]


async def misspell_option_of_connect() -> Any:
    return connect("practice", tmeout=3)  # pyright: ignore[reportCallIssue]


async def misspell_option_of_run() -> Any:
    turn = Turn([user("Hello")])
    return await connect("practice").run(turn, max_tokns=5)  # pyright: ignore[reportCallIssue]


async def misspell_option_of_chat() -> Any:
    return await Chat("practice").chat_with_state(None, "Hello", streming=True)  # pyright: ignore[reportCallIssue]


MISSPELLED = (
    misspell_option_of_send,
    misspell_option_of_conversation,
    misspell_option_of_connect,
    misspell_option_of_run,
    misspell_option_of_chat,
)
