"""Convert the items of a prompt to a Turn.

The server's context is authoritative, so every item becomes a block. There are two special cases. Ids that the
server assigned to its items are unknown upstream and are removed. Reasoning of the model is returned by
clients encrypted, together with the digest of the conversation before it: if it still follows that
conversation, it is inserted with a record that lets the engine send it again; otherwise it is omitted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kedge import turns
from kedge.errors import InvalidTurn
from kedge.planning import AnchorRecord, ConversationState, set_state
from kedge.planning.digests import derived_digests, get_prefix_index
from kedge.server.coherence import is_model_output
from kedge.server.practice_model import PracticeRequest
from kedge.turns import Block, Turn

Item = Mapping[str, Any]
DecryptReasoning = Callable[[str], Any]

ID_PAIRED_TYPES = frozenset({"local_shell_call", "local_shell_call_output", "mcp_approval_request"})
"""Types of items that refer to each other by their ids, which are therefore retained."""

RESULT_FOLLOWS = "The result follows as a message."


def pack_reasoning(block: turns.ReasoningBlock, prefix_digest: str) -> Any:
    """Return the payload to encrypt with a reasoning item; None if it cannot be sent again."""
    if not block.encrypted_content:
        return None
    return {"block": turns.dump_block(block), "before": prefix_digest}


@dataclass(slots=True)
class _ResponseSpan:
    """The output of one upstream response, according to its reasoning items."""

    response_id: str
    prefix_digest: str
    start: int
    stop: int
    output_index: int


@dataclass(slots=True)
class _TurnBuilder:
    """The blocks so far, and the spans among them that start with a reasoning block."""

    decrypt_reasoning: DecryptReasoning
    open_calls: dict[str, Block] = field(default_factory=dict[str, Block])
    """Tool calls without a result so far, by their ids."""
    blocks: list[Block] = field(default_factory=list[Block])
    spans: list[_ResponseSpan] = field(default_factory=list[_ResponseSpan])
    current: _ResponseSpan | None = None

    def add(self, item: Item) -> None:
        """Convert the next item."""
        if item.get("type") == "reasoning":
            self._add_reasoning(item)
            return
        if item.get("type") not in ID_PAIRED_TYPES:
            item = {name: value for name, value in item.items() if name != "id"}
        block = turns.block_from_item(item)

        if isinstance(block, turns.ToolCallBlock):
            # Some clients chain on a response and send its call again before the result; APIs reject that.
            if block == self.open_calls.get(block.call_id):
                return
            self.open_calls[block.call_id] = block
        elif isinstance(block, turns.ToolResultBlock):
            self.open_calls.pop(block.call_id, None)

        if self.current is not None and is_model_output(item):
            self.current.output_index += 1
            self.current.stop += 1
            source = turns.Source(
                self.current.response_id, block.item_id, self.current.output_index
            )
            block = block.with_source(source).with_origin("engine")
        else:
            self.current = None
        self.blocks.append(block)

    def _add_reasoning(self, item: Item) -> None:
        encrypted = item.get("encrypted_content")
        if not encrypted:
            return  # only in plain text
        reasoning = _unpack_reasoning(self.decrypt_reasoning(encrypted))
        if reasoning is None:
            return  # from another model
        block, prefix_digest = reasoning
        if self.current is None or self.current.response_id != block.response_id:
            start = len(self.blocks)
            self.current = _ResponseSpan(block.response_id, prefix_digest, start, start, -1)
            self.spans.append(self.current)

        if block.output_index is None:
            self.current.output_index += 1
        else:
            self.current.output_index = block.output_index
        self.current.stop += 1
        self.blocks.append(block)


def _unpack_reasoning(payload: Any) -> tuple[turns.ReasoningBlock, str] | None:
    """Return the block of a payload, and the digest of the conversation before it; None if it is no valid payload."""
    try:
        block = turns.load_block(payload["block"])
        prefix_digest = payload["before"]
    except (InvalidTurn, KeyError, TypeError):
        return None
    if not isinstance(block, turns.ReasoningBlock) or not isinstance(prefix_digest, str):
        return None
    if not block.response_id:
        return None
    return block, prefix_digest


def _split_item(item: Item, *, text_results: bool) -> list[Item]:
    """Return equivalent items in forms that every API supports."""
    if item.get("role") in ("system", "developer"):
        return _split_system_message(item)
    if text_results and str(item.get("type")).endswith("_call_output"):
        return _split_result(item)
    return [item]


def _split_system_message(item: Item) -> list[Item]:
    """Return a message for each text."""
    parts = _get_parts(item, "content")
    if not parts or any(part.get("type") != "input_text" for part in parts):
        return [item]
    return [{**item, "content": [part]} for part in parts]


def _split_result(item: Item) -> list[Item]:
    """Return a result with its texts, and a message of the user with the rest of it."""
    parts = _get_parts(item, "output")
    texts = [part for part in parts if part.get("type") == "input_text"]
    rest = [part for part in parts if part.get("type") != "input_text"]
    if not rest:
        return [item]
    message = {"type": "message", "role": "user", "content": rest}
    return [{**item, "output": texts or RESULT_FOLLOWS}, message]


def _get_parts(item: Item, member: str) -> list[Item]:
    parts = item.get(member)
    if isinstance(parts, list):
        return cast("list[Item]", parts)
    return []


def build_turn(
    ask: PracticeRequest,
    decrypt_reasoning: DecryptReasoning,
    scope: str,
    *,
    text_results: bool = False,
) -> Turn:
    """Build the Turn of a request.

    Args:
        ask: The request.
        decrypt_reasoning: A function that decrypts the reasoning of earlier answers.
        scope: The engine's scope.
        text_results: Whether results of tools can only be text; images and files in them then
            become a user message after the results.

    Returns:
        The Turn.
    """
    builder = _TurnBuilder(decrypt_reasoning)
    for item in ask.items:
        for part in _split_item(item, text_results=text_results):
            builder.add(part)
    lead: list[Block] = []
    if ask.instructions:
        lead.append(turns.system(ask.instructions))
    turn = Turn([*lead, *builder.blocks])
    records = tuple(_build_records(turn, builder.spans, scope, len(lead)))
    if not records:
        return turn
    return set_state(turn, ConversationState(anchors=records))


def _build_records(
    turn: Turn, spans: Sequence[_ResponseSpan], scope: str, offset: int
) -> Iterator[AnchorRecord]:
    """Yield a record for each span that still follows the conversation it was generated from."""
    prefixes = get_prefix_index(turn)
    for span in spans:
        start = span.start + offset - turn.lead
        stop = span.stop + offset - turn.lead
        if start < 0 or prefixes.digest(prefixes.count(start)) != span.prefix_digest:
            continue
        covered = prefixes.count(stop)
        yield AnchorRecord(
            response_id=span.response_id,
            scope=scope,
            digest=prefixes.digest(covered),
            block_count=covered,
            stored=False,
            derived=derived_digests(turn.blocks[turn.lead + start : turn.lead + stop]),
        )
