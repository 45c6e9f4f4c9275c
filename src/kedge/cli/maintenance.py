"""``kedge export``, ``import``, ``delete``, ``gc`` and ``verify``: maintain the conversations of a store."""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import click

from kedge._internal.display import escape_json, format_size, pluralize, sanitize_text
from kedge._internal.files import create_private_file
from kedge._internal.json_text import decode
from kedge.cli.base import Result, echo, echo_note, is_json, kedge_command
from kedge.cli.store_options import (
    complete_names,
    conversations_argument,
    duration_option,
    find_conversation,
    find_conversations,
    find_store_url,
    model_option,
    model_references,
    require_confirmed,
    resolve_model,
    run_with_store,
    store_option,
    store_practice_responses,
)
from kedge.config import check_output_file, mask_url, store_file
from kedge.conversation.lookup import SERVER_SCOPE, name_model
from kedge.engines import ResponsesEngine
from kedge.errors import InvalidTurn, KedgeError
from kedge.evidence.object_claims import UnusedObject
from kedge.providers import connect
from kedge.store import ConversationRow, Damage, Store
from kedge.turns import Block
from kedge.wire import blocks_from_messages

Json = dict[str, Any]


@kedge_command("export")
@conversations_argument
@click.option("--out", type=click.Path(path_type=Path), help="A file.  [default: standard output]")
@click.option(
    "--proxied",
    is_flag=True,
    help="Instead the requests and responses that 'kedge proxy --keep-bodies' stored.",
)
@store_option
def export_command(
    conversations: tuple[str, ...], out: Path | None, proxied: bool
) -> Result | None:
    """Write conversations (default: all) as JSON lines, with trees, anchors and statistics.

    'kedge import' restores them. With --json and --out a summary is printed.
    """
    if proxied and conversations:
        raise click.UsageError("--proxied exports requests, which belong to no conversation")
    if is_json() and out is None:
        raise click.UsageError(
            "the output is JSON already; --json prints a summary of a file, so it needs --out"
        )
    if out is not None:
        check_output_file(out, find_store_url())

    async def work(opened: Store) -> list[str]:
        if proxied:
            return await opened.export_proxied()
        rows = await find_conversations(opened, conversations)
        return [await opened.export(row) for row in rows]

    exports = run_with_store(work)
    content = "".join(exports)
    if out is None:
        # UTF-8, so that it can be imported
        click.echo(escape_json(content).encode(), nl=False)
        return None
    _write_file(out, content.encode())
    lines = content.count("\n")
    kind = "request" if proxied else "conversation"
    text = f"{pluralize(len(exports), kind)}, {pluralize(lines, 'line')} in {out}"
    value = {"file": str(out), f"{kind}s": len(exports), "lines": lines}
    return Result(value, lambda: echo(text, err=True))


def _write_file(path: Path, content: bytes) -> None:
    """Write a file; one that exists, such as the last backup, is replaced when the new one is complete."""
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(content)
        return
    target = path.resolve()
    # Another user may know the name of the file, and plant a link with the name of the temporary one.
    part = target.with_name(f"{target.name}.{token_hex(8)}.part")
    try:
        with create_private_file(part) as file:
            if target.exists():
                shutil.copymode(target, part)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@kedge_command("import")
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@store_option
def import_command(file: Path) -> Result:
    """Import the conversations of FILE ('-' for standard input), all or none.

    FILE is a file that 'kedge export' wrote, or has messages of the Chat Completions API: a JSON list, an object
    with the member "messages", or one of these in each line.
    """
    with click.open_file(str(file), encoding="utf-8", errors="strict") as stream:
        text = stream.read().removeprefix("\ufeff")
    # Not splitlines: it also splits at other characters, which JSON strings may contain.
    lines = [line for line in text.split("\n") if line.strip()]
    chats = _read_chats(text, lines)

    async def work(opened: Store) -> list[ConversationRow]:
        if chats is None:
            return await opened.import_(lines)
        return await opened.create_all(chats)

    rows = run_with_store(work, make=True)
    listed = "\n".join(f"{row.id}  {sanitize_text(row.title)}".rstrip() for row in rows)
    summary = listed or "Nothing was imported: there are no conversations in the input."
    return Result([{"id": row.id, "title": row.title} for row in rows], summary)


def _read_chats(text: str, lines: list[str]) -> list[list[Block]] | None:
    """Return the blocks of each chat of the Chat Completions API that has any; None if the file has another form."""
    try:
        values = [decode(text)]
    except (ValueError, RecursionError):
        try:
            values = [decode(line) for line in lines]
        except (ValueError, RecursionError):
            return None
    chats: list[list[Block]] = []
    for number, value in enumerate(values, 1):
        messages = value
        if isinstance(value, dict):
            messages = cast("dict[str, Any]", value).get("messages")
        if not isinstance(messages, list):
            return None
        try:
            blocks = blocks_from_messages(cast("list[Any]", messages))
        except InvalidTurn as error:
            raise KedgeError(f"chat {number}: {error}; nothing was imported") from error
        if blocks:
            chats.append(blocks)
    return chats


@kedge_command("delete")
@click.argument("conversation", required=False, shell_complete=complete_names)
@duration_option(
    "--older-than", "Delete all conversations that did not change for this long, such as 30d."
)
@click.option("--tag", help="With --older-than: only conversations with this tag.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@store_option
def delete_command(
    conversation: str | None, older_than: float | None, tag: str | None, yes: bool
) -> Result:
    """Delete a conversation: its rows, and the blocks that no other conversation uses.

    With --older-than, delete all that did not change for a time, archived ones included. The practice
    model's memory of them is erased, too. Their conversation objects are deleted at the provider, as 'kedge gc' does.
    Responses stored by other providers remain there until they expire.
    """
    if (conversation is None) == (older_than is None):
        raise click.UsageError("give either a CONVERSATION or --older-than")
    if older_than is not None:
        return _delete_older(older_than, tag, yes=yes)
    if tag is not None:
        raise click.UsageError("--tag is used with --older-than")
    row = run_with_store(lambda opened: find_conversation(opened, conversation or ""))
    name = sanitize_text(row.title or row.id)
    if not yes:
        _confirm(f"Delete {name} permanently?")

    async def work(opened: Store) -> Json:
        await opened.delete(row)
        return await _delete_unused(opened)

    text = f"{name} deleted; 'kedge gc' reclaims its space"
    return Result({"id": row.id, "deleted": True, **run_with_store(work)}, text)


def _confirm(question: str) -> None:
    """Ask for confirmation; raise ``Abort`` if it is denied, and a usage error if the input has no answer."""
    try:
        is_confirmed = click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        echo(err=True)
        raise click.UsageError("it was not confirmed; --yes deletes without a question") from None
    if not is_confirmed:
        raise click.Abort


def _delete_older(age: float, tag: str | None, *, yes: bool) -> Result:
    if not yes:
        older = run_with_store(lambda opened: opened.list_older(age, tag=tag))
        _confirm(f"Delete {pluralize(len(older), 'conversation')} permanently?")

    async def work(opened: Store) -> tuple[list[str], Json]:
        return await opened.delete_older(age, tag=tag), await _delete_unused(opened)

    deleted, objects = run_with_store(work)
    text = f"{pluralize(len(deleted), 'conversation')} deleted; 'kedge gc' reclaims the space"
    return Result({"deleted": deleted, **objects}, text)


@kedge_command("gc")
@click.option("--dry-run", is_flag=True, help="List what is unused; delete nothing.")
@store_option
def gc_command(dry_run: bool) -> Result:
    """Delete expired conversations permanently, and reclaim the space of deleted data.

    Conversations expire if they were created with a time to live (kedge chat --ttl). Branches that were
    undone or regenerated are history and remain. Conversation objects that Kedge made and that no stored conversation
    continues are deleted at their providers; those that could not be deleted are named, and tried again next time.
    """
    if dry_run:
        return run_with_store(_list_unused)

    async def work(opened: Store) -> tuple[int, Json]:
        removed_blocks = await opened.gc()  # deletes expired conversations, too
        return removed_blocks, await _delete_unused(opened)

    file = store_file(find_store_url())
    size_before = 0
    if file and file.exists():
        size_before = file.stat().st_size
    removed_blocks, objects = run_with_store(work)
    freed_bytes: int | None = None
    text = f"{pluralize(removed_blocks, 'block')} removed"
    if file:
        freed_bytes = max(size_before - file.stat().st_size, 0)
        text += f", {format_size(freed_bytes)} reclaimed"
    return Result({"blocks": removed_blocks, "freed_bytes": freed_bytes, **objects}, text)


async def _list_unused(store: Store) -> Result:
    """Show the expired conversations of a store, and the conversation objects that none of its lines continues."""
    expired = await store.list_expired()
    unused = await store.list_unused_objects()
    lines = [
        f"{pluralize(len(expired), 'expired conversation')}",
        *(f"  {name}" for name in expired),
        f"{pluralize(len(unused), 'unused conversation object')}",
        *(f"  {unused_object.id}  {unused_object.scope}" for unused_object in unused),
    ]
    objects = [_shape_object(unused_object) for unused_object in unused]
    value = {"conversations": expired, "objects": objects}
    return Result(value, sanitize_text("\n".join(lines)))


async def _delete_unused(store: Store) -> Json:
    """Delete what providers hold for no stored conversation; return the result as JSON."""
    unused = await store.list_unused_objects()
    problems: dict[UnusedObject, str] = {}
    with store_practice_responses(find_store_url()):
        for scope in dict.fromkeys(unused_object.scope for unused_object in unused):
            of_scope = [unused_object for unused_object in unused if unused_object.scope == scope]
            problems |= await _delete_objects(store, of_scope)
    deleted: list[Json] = []
    kept: list[Json] = []
    for unused_object, problem in problems.items():
        if problem:
            kept.append({**_shape_object(unused_object), "problem": problem})
            name = f"the conversation object {unused_object.id} of {unused_object.scope}"
            echo_note(f"{name} was not deleted: {problem}")
        else:
            deleted.append(_shape_object(unused_object))
    if deleted:
        echo_note(f"{pluralize(len(deleted), 'conversation object')} deleted at the provider")
    return {"objects_deleted": deleted, "objects_kept": kept}


async def _delete_objects(store: Store, unused: Sequence[UnusedObject]) -> dict[UnusedObject, str]:
    """Delete the unused objects of one server; return for each why it was not deleted, empty if it was."""
    scope = unused[0].scope
    if scope.startswith(SERVER_SCOPE):
        return dict.fromkeys(unused, "it is on a server of 'kedge serve', whose page deletes it")
    provider, _, _ = scope.partition("/")
    model = "practice"
    if provider != "practice":
        model = name_model(provider, scope, "any")
    advice = "use it with 'kedge chat --model' first"
    try:
        require_confirmed(model_references(model), "the store", advice, may_ask=False)
        async with connect(model, max_retries=0) as engine:
            if isinstance(engine, ResponsesEngine) and engine.scope == scope:
                return await engine.objects.delete_unused(store)
        problem = "it belongs to another account; set the API key of that account"
    except KedgeError as error:
        problem = str(error)
    return dict.fromkeys(unused, problem)


def _shape_object(unused: UnusedObject) -> dict[str, str]:
    return {"scope": unused.scope, "id": unused.id}


@kedge_command("verify")
@conversations_argument
@click.option("--server", is_flag=True, help="Also compare with what the provider holds.")
@model_option
@store_option
def verify_command(conversations: tuple[str, ...], server: bool, model: str | None) -> Result:
    """Recompute every digest of the complete store and report damage.

    With --server, also fetch what the provider holds for the anchor of each CONVERSATION (default: all)
    and compare. The exit code is 1 if something differs, or if a named CONVERSATION cannot be compared because
    its model cannot be used here.
    """

    async def work(opened: Store) -> tuple[list[Damage], list[Json]]:
        rows: list[ConversationRow] = []
        if server or conversations:
            rows = await find_conversations(opened, conversations)
        damage = await opened.verify()
        return damage, [await _audit(opened, row, model) for row in rows if server]

    damage, audits = run_with_store(work, connects_models=server)
    differs = any(audit["agrees"] is False for audit in audits)
    is_unknown = bool(conversations) and any(audit["error"] for audit in audits)
    is_wrong = bool(damage) or differs or is_unknown
    report = {
        "ok": not is_wrong,
        "damage": [{"where": part.where, "problem": part.problem} for part in damage],
        "audits": audits,
    }
    return Result(report, lambda: _print_report(damage, audits), exit_code=int(is_wrong))


async def _audit(store: Store, row: ConversationRow, requested: str | None) -> Json:
    """Compare a conversation's anchor with the provider's data; ``agrees`` is None if unknown."""
    turn = (await store.load(row)).turn(row.id)
    report: Json = {"conversation": row.id, "title": row.title, "error": False}
    try:
        model = await resolve_model(store, row, requested)
        report["model"] = mask_url(model)
        async with connect(model) as engine:
            audit: Any = getattr(engine, "verify", None)
            if audit is None:
                return {**report, "agrees": None, "words": "this provider stores no responses"}
            comparison = await audit(turn)
    except KedgeError as error:
        return {**report, "agrees": None, "words": str(error), "error": True}
    words = str(comparison)
    if comparison.agrees is None:
        words = comparison.difference
    return {**report, "agrees": comparison.agrees, "words": words}


def _print_report(damage: list[Damage], audits: list[Json]) -> None:
    for part in damage:
        echo(f"{click.style('damaged', fg='red')}  {part}")
    if not damage:
        echo("No damage found: every digest is correct.")
    labels = {True: ("agrees", "green"), False: ("differs", "red"), None: ("unknown", "yellow")}
    for audit in audits:
        label, color = labels[audit["agrees"]]
        name = sanitize_text(audit["title"] or audit["conversation"])
        echo(f"{click.style(label, fg=color)}  {name}: {audit['words']}")
