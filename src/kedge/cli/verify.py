"""``kedge verify``: check the store, and compare it with the data that the provider stores."""

import sys
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import (
    MAX_CONVERSATIONS,
    complete_names,
    find_conversation,
    model_option,
    resolve_model,
    run_with_store,
    store_option,
)
from kedge.config import mask_url
from kedge.errors import KedgeError
from kedge.text_format import sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Damage, Store

AuditReport = dict[str, Any]


@kedge_command("verify", short_help="Check the store; with --server also the provider's data.")
@click.argument(
    "conversations", nargs=-1, metavar="[CONVERSATION]...", shell_complete=complete_names
)
@click.option("--server", is_flag=True, help="Also compare with what the provider holds.")
@model_option
@store_option
def command(
    conversations: tuple[str, ...], server: bool, model: str | None, store: str, as_json: bool
) -> None:
    """Recompute every digest of the complete store and report damage.

    With --server, also fetch what the provider holds for the anchor of each CONVERSATION (default: all)
    and compare. The exit code is 1 if something differs.
    """

    async def work(opened: "Store") -> "tuple[list[Damage], list[AuditReport]]":
        rows = [await find_conversation(opened, name) for name in conversations]
        damage = await opened.verify()
        if not server:
            return damage, []
        if not rows:
            rows = await opened.conversations(archived=None, limit=MAX_CONVERSATIONS)
        return damage, [await _audit(opened, row, model) for row in rows]

    damage, audits = run_with_store(work, address=store, connects=server)
    wrong = bool(damage) or any(audit["agrees"] is False for audit in audits)
    if as_json:
        found = [{"where": each.where, "problem": each.problem} for each in damage]
        echo_json({"ok": not wrong, "damage": found, "audits": audits})
    else:
        _print_report(damage, audits)
    if wrong:
        sys.exit(1)


async def _audit(store: "Store", row: "ConversationRow", requested: str | None) -> AuditReport:
    """Compare a conversation's anchor with the provider's data; ``agrees`` is None if unknown."""
    from kedge.providers import connect

    turn = (await store.load(row)).turn(row.id)
    report: AuditReport = {"conversation": row.id, "title": row.title}
    try:
        model = resolve_model(row, requested)
        report["model"] = mask_url(model)
        async with connect(model) as engine:
            audit: Any = getattr(engine, "verify", None)
            if audit is None:
                return {**report, "agrees": None, "words": "this provider stores no responses"}
            found = await audit(turn)
    except KedgeError as error:
        return {**report, "agrees": None, "words": str(error)}
    text = found.difference if found.agrees is None else str(found)
    return {**report, "agrees": found.agrees, "words": text}


def _print_report(damage: "list[Damage]", audits: list[AuditReport]) -> None:
    for each in damage:
        echo(f"{click.style('damaged', fg='red')}  {each}")
    if not damage:
        echo("No damage found: every digest is correct.")
    labels = {True: ("agrees", "green"), False: ("differs", "red"), None: ("unknown", "yellow")}
    for audit in audits:
        label, color = labels[audit["agrees"]]
        name = sanitize_text(audit["title"] or audit["conversation"])
        echo(f"{click.style(label, fg=color)}  {name}: {audit['words']}")
