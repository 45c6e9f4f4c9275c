"""``kedge verify``: whether the store is what it says, and the provider holds what it believes."""

import sys
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.output import say, say_json
from kedge.cli.stored import (
    MANY,
    complete_names,
    find_conversation,
    model_for,
    model_option,
    store_option,
    with_store,
)
from kedge.cli.words import printable
from kedge.config import mask_url
from kedge.errors import KedgeError

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Damage, Store

Audited = dict[str, Any]


@kedge_command("verify", short_help="Check digests; with --server, what the provider holds.")
@click.argument(
    "conversations", nargs=-1, metavar="[CONVERSATION]...", shell_complete=complete_names
)
@click.option("--server", is_flag=True, help="Compare with what the provider really holds, too.")
@model_option
@store_option
def command(
    conversations: tuple[str, ...], server: bool, model: str | None, store: str, as_json: bool
) -> None:
    """Derive every digest of the store again, and name what is damaged.

    With --server, also fetch what the provider holds for the anchor of each CONVERSATION (of all of them
    by default), and compare. The exit code is 1 if something differs.
    """

    async def work(opened: "Store") -> "tuple[list[Damage], list[Audited]]":
        damage = await opened.verify()
        if not server:
            return damage, []
        if conversations:
            rows = [await find_conversation(opened, name) for name in conversations]
        else:
            rows = await opened.conversations(archived=None, limit=MANY)
        return damage, [await _audit(opened, row, model_for(row, model)) for row in rows]

    damage, audits = with_store(work, given=store)
    wrong = bool(damage) or any(audit["agrees"] is False for audit in audits)
    if as_json:
        found = [{"where": each.where, "problem": each.problem} for each in damage]
        say_json({"ok": not wrong, "damage": found, "audits": audits})
    else:
        _show(damage, audits)
    if wrong:
        sys.exit(1)


async def _audit(store: "Store", row: "ConversationRow", model: str) -> Audited:
    """What the provider holds for a conversation's anchor, compared; ``None`` if it does not tell."""
    from kedge.providers import connect

    turn = (await store.load(row)).turn(row.id)
    told: Audited = {"conversation": row.id, "title": row.title, "model": mask_url(model)}
    try:
        async with connect(model) as engine:
            audit: Any = getattr(engine, "verify", None)
            if audit is None:
                return {**told, "agrees": None, "words": "nothing is kept there to compare with"}
            found = await audit(turn)
    except KedgeError as error:
        return {**told, "agrees": None, "words": str(error)}
    return {**told, "agrees": found.agrees, "words": str(found)}


def _show(damage: "list[Damage]", audits: list[Audited]) -> None:
    for each in damage:
        say(f"{click.style('damaged', fg='red')}  {each}")
    if not damage:
        say("The store is sound: every digest is what it should be.")
    words = {True: ("agrees", "green"), False: ("differs", "red"), None: ("not told", "yellow")}
    for audit in audits:
        word, color = words[audit["agrees"]]
        name = printable(audit["title"] or audit["conversation"])
        say(f"{click.style(word, fg=color)}  {name}: {audit['words']}")
