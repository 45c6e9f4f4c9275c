"""From what the server asks to what an engine takes: items become a Turn.

The server's context is the truth here, so every item becomes a block. Two things need care. Ids that
the server gave its items mean nothing upstream and stay here. And a thought of the model comes back
sealed, together with the digest of the conversation that it followed: if that is what it still follows,
the thought is put in its place with a record that lets the engine send it again; otherwise it is
left out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.errors import InvalidTurn
from kedge.planning import AnchorRecord, ConversationState, set_state
from kedge.planning.ledger import ledger_of
from kedge.planning.proof import derived_from
from kedge.practice import Ask
from kedge.server.coherence import by_model
from kedge.turns import (
    OUTPUT_INDEX,
    RESPONSE_ID,
    Block,
    ReasoningBlock,
    Turn,
    block_from_item,
    dump_block,
    load_block,
    system,
)

Item = Mapping[str, Any]
Unseal = Callable[[str], Any]

NAMED = frozenset({"local_shell_call", "local_shell_call_output", "mcp_approval_request"})
"""Types of items that find each other by their ids, which are therefore kept."""


def kept_with(block: ReasoningBlock, before: str) -> Any:
    """What to keep sealed with a thought; None for one that nobody can send again."""
    if not block.encrypted_content:
        return None
    return {"block": dump_block(block), "before": before}


@dataclass(slots=True)
class _Run:
    """The output of one response upstream, as far as its thoughts tell of it."""

    response_id: str
    before: str
    start: int
    stop: int
    place: int


@dataclass(slots=True)
class _Reading:
    """Blocks as they are read, and the outputs among them that began with a thought."""

    unseal: Unseal
    blocks: list[Block] = field(default_factory=list[Block])
    runs: list[_Run] = field(default_factory=list[_Run])
    going: _Run | None = None

    def take(self, item: Item) -> None:
        """Take the next item."""
        if item.get("type") == "reasoning":
            self._think(item)
            return
        block = block_from_item(_unnamed(item))
        if self.going is not None and by_model(item):
            self.going.place += 1
            self.going.stop += 1
            tags = {RESPONSE_ID: self.going.response_id, OUTPUT_INDEX: self.going.place}
            block = block.with_metadata(tags).with_origin("engine")
        else:
            self.going = None
        self.blocks.append(block)

    def _think(self, item: Item) -> None:
        sealed = item.get("encrypted_content")
        thought = _thought(self.unseal(sealed)) if sealed else None
        if thought is None:
            return  # of another model, or told in words only
        block, before = thought
        place = block.metadata.get(OUTPUT_INDEX)
        if self.going is None or self.going.response_id != block.response_id:
            at = len(self.blocks)
            self.going = _Run(block.response_id, before, at, at, -1)
            self.runs.append(self.going)
        self.going.place = place if isinstance(place, int) else self.going.place + 1
        self.going.stop += 1
        self.blocks.append(block)


def _thought(kept: Any) -> tuple[ReasoningBlock, str] | None:
    try:
        block = load_block(kept["block"])
        before = kept["before"]
    except (InvalidTurn, KeyError, TypeError):
        return None
    if not isinstance(block, ReasoningBlock) or not isinstance(before, str):
        return None
    return (block, before) if block.response_id else None


def _unnamed(item: Item) -> Item:
    if item.get("type") in NAMED:
        return item
    return {name: value for name, value in item.items() if name != "id"}


def turn_of(ask: Ask, unseal: Unseal, scope: str) -> Turn:
    """The Turn that says what the server asks; ``scope`` is the engine's."""
    reading = _Reading(unseal)
    for item in ask.items:
        reading.take(item)
    lead = [system(ask.instructions)] if ask.instructions else []
    turn = Turn([*lead, *reading.blocks])
    records = tuple(_records(turn, reading.runs, scope, len(lead)))
    return set_state(turn, ConversationState(anchors=records)) if records else turn


def _records(turn: Turn, runs: list[_Run], scope: str, shift: int) -> Iterator[AnchorRecord]:
    """Vouch for the thoughts whose conversation is the one that they followed."""
    ledger = ledger_of(turn)
    for run in runs:
        start, stop = run.start + shift - turn.lead, run.stop + shift - turn.lead
        if start < 0 or ledger.digest(ledger.count(start)) != run.before:
            continue
        covered = ledger.count(stop)
        yield AnchorRecord(
            response_id=run.response_id,
            scope=scope,
            digest=ledger.digest(covered),
            block_count=covered,
            stored=False,
            derived=derived_from(turn.blocks[turn.lead + start : turn.lead + stop]),
        )
