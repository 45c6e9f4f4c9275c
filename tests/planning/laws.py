"""The laws of planning, each a function that raises ``Broken`` where it does not hold.

Whoever plays a conversation (``planning.play``) hands in what was planned and what is true: the Turn,
the servers' memories, and a note on every response from when it was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.planning import (
    AnchorRecord,
    RequestPlan,
    build_input_from_blocks,
    get_state,
    render,
)
from kedge.turns import ReasoningBlock, Turn, dump_block
from planning import normal
from planning.memory import (
    ID_IS_CONTENT,
    Gone,
    Item,
    Memory,
    Refused,
    check_pairs,
    effective,
    words,
)
from planning.naive import naive_digests


class Broken(AssertionError):
    """A law does not hold."""

    def __init__(self, law: str, *details: object) -> None:
        super().__init__("\n".join([law, *map(str, details)]))
        self.law = law


@dataclass(frozen=True)
class Note:
    """What was true when a response was taken down."""

    visible: list[normal.Normal]
    """Every block up to and including the output, but reasoning."""
    output: list[object]
    """The output as it stood there, reasoning included."""


@dataclass(frozen=True)
class Case:
    """One plan, and what is true around it."""

    turn: Turn
    plan: RequestPlan
    memory: Memory
    memories: Sequence[Memory]
    notes: dict[str, Note]
    now: float

    @property
    def sent(self) -> list[Item]:
        """The items of the request, whether or not it may be sent."""
        return build_input_from_blocks(self.plan.delta, self.plan.intact)

    @property
    def full(self) -> list[Item]:
        """The items of a request that sends everything."""
        return render(self.turn, scope=self.memory.scope)

    @property
    def remembered(self) -> list[Item]:
        """What the server holds before the request."""
        if self.plan.conversation_id:
            return effective(self.memory.conversations[self.plan.conversation_id])
        if not self.plan.anchor:
            return []
        try:
            return self.memory.context(self.plan.previous_response_id, self.now)
        except Gone as gone:
            known = self.memory.responses.get(str(gone))
            if known and known.forgotten:
                raise  # behind our back: nobody could know
            raise Broken("coherence", "anchored on what is gone", self.plan) from None
        except Refused as refusal:
            raise Broken("coherence", refusal, self.plan) from None


def coherence(case: Case) -> None:
    """What the server holds and what it is sent are together what the Turn says."""
    said = normal.of_turn(case.turn, case.memories)
    if normal.of_items(case.full, case.memory) != said:
        raise Broken("coherence", "a full send differs", said, case.full)
    together = [*case.remembered, *case.sent]
    if normal.of_items(together, case.memory) != said:
        raise Broken("coherence", "a chained send differs", said, together, case.plan.explain())


def minimality(case: Case) -> None:
    """No longer provable prefix was passed over, nor a newer one of the same length."""
    state = get_state(case.turn)
    if case.plan.mode != "chained":
        return
    digests = naive_digests(case.turn)
    said, first = normal.of_turn(case.turn, case.memories), _beginning(case.full)
    best: tuple[int, float] | None = None
    for record in state.anchors:
        proven = 0 < record.block_count < len(digests)
        proven = proven and digests[record.block_count] == record.digest
        if not proven or not _can_be_asked(record, case):
            continue
        held = _held(record, case.memory)
        seen = normal.of_items(held, case.memory)
        if said[: len(seen)] == seen and _beginning(held) == first:
            best = max(best or (0, 0.0), (record.block_count, record.created_at))
    anchor = case.plan.anchor
    if (anchor and (anchor.block_count, anchor.created_at)) != best:
        raise Broken("minimality", best, case.plan.explain())


def no_leak(case: Case) -> None:
    """Nothing derived goes out unless all that it was made from still stands (laws 4 and 6)."""
    present = words(dump_block(block) | {"metadata": {}} for block in case.turn.blocks)
    for item in (*case.sent, *case.full):
        if not words([item]) <= present:
            raise Broken("no leak", "words that are not in the Turn", item)
        content = item.get("encrypted_content", "")
        if not case.memory.sources.get(content, frozenset()) <= present:
            raise Broken("no leak", "made from words that are not in the Turn", item)
        name = item.get("id")
        if name and item["type"] not in ID_IS_CONTENT:
            if name not in case.memory.issued:
                raise Broken("no leak", "an id that is not this server's", item)
            if not _is_intact(case.memory.issued[name][1], case):
                raise Broken("no leak", "an id of a response that was changed", item)
    if not words([case.plan.instructions]) <= present:
        raise Broken("no leak", "instructions that are not in the Turn")


def problems(case: Case) -> None:
    """A plan has problems exactly if a server would refuse the conversation for its calls."""
    try:
        check_pairs(effective(case.full))
        refused = None
    except Refused as refusal:
        refused = refusal
    if bool(case.plan.problems) != bool(refused):
        raise Broken("problems", refused, case.plan.problems)


def sizes(case: Case) -> None:
    """The counts of a plan are those of what it sends."""
    plan = case.plan
    whole = (plan.delta_blocks, plan.delta_bytes) <= (plan.full_blocks, plan.full_bytes)
    if not whole or len(case.sent) != plan.delta_blocks - len(plan.left_out):
        raise Broken("sizes", plan)
    if not plan.explain():
        raise Broken("sizes", "nothing to say", plan)


LAWS = (coherence, minimality, no_leak, problems, sizes)


def _can_be_asked(record: AnchorRecord, case: Case) -> bool:
    """Whether the server can be asked for a response, as far as a client can know."""
    memory = case.memory
    response = memory.responses.get(record.response_id)
    if response is None or record.scope != memory.scope or record.status == "lost":
        return False
    chain = [response]
    while (parent := chain[-1].parent) is not None:
        chain.append(parent)
    margin = min(3600.0, memory.retention / 20)
    ends = min(each.created_at for each in chain) + memory.retention - margin
    short = memory.remembers is None or len(chain) <= memory.remembers
    return response.status == "completed" and response.stored and case.now < ends and short


def _held(record: AnchorRecord, memory: Memory) -> list[Item]:
    """What the server holds for a response."""
    items: list[Item] = []
    response = memory.responses.get(record.response_id)
    while response is not None:
        items = [*response.items, *items]
        response = response.parent
    return effective(items)


def _beginning(items: Sequence[Item]) -> str:
    """The compaction with which items begin, if any."""
    if items and items[0]["type"] == "compaction":
        return items[0]["encrypted_content"]
    return ""


def _is_intact(response_id: str, case: Case) -> bool:
    """Whether a response's prefix and its own output, reasoning included, stand as they were."""
    note = case.notes[response_id]
    if normal.visible(case.turn)[: len(note.visible)] != note.visible:
        return False
    return output_of(case.turn, response_id, len(note.visible)) == note.output


def output_of(turn: Turn, response_id: str, ends: int) -> list[object]:
    """What stands of a response's output before visible block number ``ends``, reasoning included."""
    found: list[object] = []
    for block in turn.body:
        if not ends:
            break
        if not isinstance(block, ReasoningBlock):
            ends -= 1
            found.append(normal.of_block(block))
        elif block.metadata.get("response_id") == response_id:
            found.append(block.content)
    return found
