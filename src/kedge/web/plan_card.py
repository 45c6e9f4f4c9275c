"""Build plan cards: the blocks that a past request sent, its anchor, and why newer candidates were rejected.

Everything on a card is in the record of the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge._internal.display import capitalize, pluralize
from kedge.store import RequestRecord, StoredExchange
from kedge.turns import Block
from kedge.turns.text_format import BLOCK_NAMES, describe
from kedge.web.transcript import indent_json

BLOCK_LABELS = {kind: capitalize(name) for kind, name in BLOCK_NAMES.items()}
"""The names of the kinds of blocks."""
FOLD_ENDS = 4
"""The number of unsent blocks shown at either end of a long run of them."""
MAX_BODY_CHARS = 200_000
"""The maximum number of characters shown of a raw body."""


@dataclass(frozen=True, slots=True)
class BlockMark:
    """One block in a plan card, or several folded into one mark."""

    kind: str = ""
    words: str = ""
    sent: bool = False
    folded: int = 0
    omitted: bool = False
    """Whether the block was not sent although the server does not have it: reasoning and compactions."""


@dataclass(frozen=True, slots=True)
class PlanCard:
    """The blocks that a request sent, and why newer candidates were rejected."""

    row: RequestRecord
    blocks: tuple[BlockMark, ...] = ()
    exchanges: Sequence[StoredExchange] = ()
    """The bodies of the request and its response, if they are stored."""
    changed: str = ""
    """The first changed block, if a change broke the chain."""


def describe_request_size(row: RequestRecord) -> str:
    """Return one sentence about the messages that were sent, and the messages that the server already had."""
    if row.is_refused:
        return f"The server refused a request with {pluralize(row.sent_blocks, 'message')}."
    if not row.anchor:
        everything = pluralize(row.full_blocks, "message")
        return f"Sent all {everything}." if row.full_blocks > 1 else f"Sent {everything}."
    if not row.sent_blocks and not row.saved_blocks:
        return "Sent no new message."
    if not row.sent_blocks:
        return f"Sent no new message; the server already had all {row.saved_blocks:,}."
    sent = pluralize(row.sent_blocks, "new message")
    if not row.saved_blocks:
        return f"Sent {sent}."
    return f"Sent {sent}; the server already had the other {row.saved_blocks:,}."


def mark_blocks(blocks: Sequence[Block], row: RequestRecord) -> tuple[BlockMark, ...]:
    """Return a mark for each block; long runs of blocks that the server had are folded.

    There are none if middleware added or removed blocks: then positions in the stored Turn mean nothing.
    """
    if row.start + row.sent_blocks + len(row.omitted) != len(blocks):
        return ()
    marks: list[BlockMark] = []
    for position, block in enumerate(blocks):
        is_omitted = position in row.omitted
        is_sent = position >= row.start and not is_omitted
        marks.append(BlockMark(block.kind, describe(block), is_sent, omitted=is_omitted))
    return (*_fold_run(marks[: row.start]), *marks[row.start :])


def _fold_run(run: list[BlockMark]) -> list[BlockMark]:
    folded = len(run) - 2 * FOLD_ENDS
    if folded <= 1:
        return run
    return [*run[:FOLD_ENDS], BlockMark(folded=folded), *run[-FOLD_ENDS:]]


def format_body(body: bytes) -> str:
    """Return a raw body as text, with its JSON indented."""
    text = indent_json(body.decode("utf-8", "replace"))
    if len(text) <= MAX_BODY_CHARS:
        return text
    return f"{text[:MAX_BODY_CHARS]}\n…"
