"""The laws of planning, each a function that raises ``LawViolation`` if the law does not hold.

The caller (``planning.simulation``) passes the plan and the facts: the Turn, the servers' stored
responses, and a snapshot of every response from when it was created.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.planning import AnchorRecord, RequestPlan, build_input_from_blocks, get_state, render
from kedge.turns import ReasoningBlock, Turn, dump_block
from planning import normal_form, reference_server
from planning.reference_digests import naive_digests
from planning.reference_server import Item, ReferenceServer, effective_items, marked_words


class LawViolation(AssertionError):
    """An error that reports a law that does not hold."""

    def __init__(self, law: str, *details: object) -> None:
        super().__init__("\n".join([law, *map(str, details)]))
        self.law = law


@dataclass(frozen=True)
class ResponseSnapshot:
    """The normal forms of a Turn at the time a response was recorded."""

    visible: list[normal_form.NormalForm]
    """Every block up to and including the output, except reasoning."""
    output: list[object]
    """The output at that time, including reasoning."""


@dataclass(frozen=True)
class PlanCase:
    """One plan, with the Turn and the servers' state it is checked against."""

    turn: Turn
    plan: RequestPlan
    server: ReferenceServer
    servers: Sequence[ReferenceServer]
    snapshots: dict[str, ResponseSnapshot]
    now: float

    @property
    def sent_items(self) -> list[Item]:
        """Return the items of the request, even if the plan has problems."""
        return build_input_from_blocks(self.plan.delta, self.plan.intact)

    @property
    def full_items(self) -> list[Item]:
        """Return the items of a request that sends everything."""
        return render(self.turn, scope=self.server.scope)

    @property
    def server_context(self) -> list[Item]:
        """Return the items the server has stored before the request."""
        if self.plan.conversation_id:
            return effective_items(self.server.conversations[self.plan.conversation_id])
        if not self.plan.anchor:
            return []
        try:
            return self.server.context(self.plan.previous_response_id, self.now)
        except reference_server.ResponseNotFound as error:
            known = self.server.responses.get(str(error))
            if known and known.forgotten:
                raise  # lost by the server: a client cannot know
            raise LawViolation("coherence", "anchored on what is gone", self.plan) from None
        except reference_server.RequestRejected as refusal:
            raise LawViolation("coherence", refusal, self.plan) from None


def check_coherence(case: PlanCase) -> None:
    """Check that the server's context plus the input equals the content of the Turn."""
    reported = normal_form.normalize_turn(case.turn, case.servers)
    if normal_form.normalize_items(case.full_items, case.server) != reported:
        raise LawViolation("coherence", "a full send differs", reported, case.full_items)
    together = [*case.server_context, *case.sent_items]
    if normal_form.normalize_items(together, case.server) != reported:
        raise LawViolation(
            "coherence", "a chained send differs", reported, together, case.plan.explain()
        )


def check_minimality(case: PlanCase) -> None:
    """Check that no longer proved prefix was ignored, nor a newer one of the same length.

    The one exception: if the best record is deeper than the server's maximum depth, a full send starts a
    new chain. An older and shallower record would stay the anchor forever, with an ever longer delta.
    """
    state = get_state(case.turn)
    if case.plan.mode != "chained":
        return
    digests = naive_digests(case.turn)
    reported, first = (
        normal_form.normalize_turn(case.turn, case.servers),
        _leading_compaction(case.full_items),
    )
    best: tuple[int, float] | None = None
    too_deep = False
    for record in state.anchors:
        proven = 0 < record.block_count < len(digests)
        proven = proven and digests[record.block_count] == record.digest
        if not proven or not _is_usable(record, case):
            continue
        context = _stored_context(record, case.server)
        visible = normal_form.normalize_items(context, case.server)
        if reported[: len(visible)] == visible and _leading_compaction(context) == first:
            candidate = (record.block_count, record.created_at)
            if best is None or candidate > best:
                best, too_deep = candidate, _is_too_deep(record, case.server)
    anchor = case.plan.anchor
    if (anchor and (anchor.block_count, anchor.created_at)) != (None if too_deep else best):
        raise LawViolation("minimality", best, case.plan.explain())


def check_no_leak(case: PlanCase) -> None:
    """Check that derived content is sent only if everything it was made from is unchanged (laws 4 and 6)."""
    present = marked_words(dump_block(block) | {"metadata": {}} for block in case.turn.blocks)
    for item in (*case.sent_items, *case.full_items):
        if not marked_words([item]) <= present:
            raise LawViolation("no leak", "words that are not in the Turn", item)
        content = item.get("encrypted_content", "")
        if not case.server.source_words.get(content, frozenset()) <= present:
            raise LawViolation("no leak", "made from words that are not in the Turn", item)
        name = item.get("id")
        if name and item["type"] not in reference_server.ID_IS_CONTENT:
            if name not in case.server.issued_items:
                raise LawViolation("no leak", "an id that is not this server's", item)
            if not _is_intact(case.server.issued_items[name][1], case):
                raise LawViolation("no leak", "an id of a response that was changed", item)
    if not marked_words([case.plan.instructions]) <= present:
        raise LawViolation("no leak", "instructions that are not in the Turn")


def check_problems(case: PlanCase) -> None:
    """Check that a plan has problems exactly if a server would reject its calls and results."""
    try:
        reference_server.check_pairs(effective_items(case.full_items))
        refused = None
    except reference_server.RequestRejected as refusal:
        refused = refusal
    if bool(case.plan.problems) != bool(refused):
        raise LawViolation("problems", refused, case.plan.problems)


def check_sizes(case: PlanCase) -> None:
    """Check that the counts of a plan match the items it sends."""
    plan = case.plan
    complete = (plan.delta_blocks, plan.delta_bytes) <= (plan.full_blocks, plan.full_bytes)
    if not complete or len(case.sent_items) != plan.delta_blocks:
        raise LawViolation("sizes", plan)
    if not plan.explain():
        raise LawViolation("sizes", "nothing to say", plan)


LAWS = (check_coherence, check_minimality, check_no_leak, check_problems, check_sizes)


def _is_usable(record: AnchorRecord, case: PlanCase) -> bool:
    """Return whether a client may use a response as an anchor, ignoring its depth."""
    memory = case.server
    response = memory.responses.get(record.response_id)
    if response is None or record.scope != memory.scope or record.status == "lost":
        return False
    chain = _get_chain(response)
    margin = min(3600.0, memory.retention / 20)
    ends = min(each.created_at for each in chain) + memory.retention - margin
    return response.status == "completed" and response.stored and case.now < ends


def _is_too_deep(record: AnchorRecord, server: ReferenceServer) -> bool:
    """Return whether a response's chain is longer than the server's maximum depth."""
    chain = _get_chain(server.responses[record.response_id])
    return server.max_depth is not None and len(chain) > server.max_depth


def _get_chain(response: reference_server.StoredResponse) -> list[reference_server.StoredResponse]:
    """Return a response and its ancestors, newest first."""
    chain = [response]
    while (parent := chain[-1].parent) is not None:
        chain.append(parent)
    return chain


def _stored_context(record: AnchorRecord, server: ReferenceServer) -> list[Item]:
    """Return the items the server has stored for a response."""
    items: list[Item] = []
    response = server.responses.get(record.response_id)
    while response is not None:
        items = [*response.items, *items]
        response = response.parent
    return effective_items(items)


def _leading_compaction(items: Sequence[Item]) -> str:
    """Return the encrypted content of the compaction at the start of the items, if any."""
    if items and items[0]["type"] == "compaction":
        return items[0]["encrypted_content"]
    return ""


def _is_intact(response_id: str, case: PlanCase) -> bool:
    """Return whether a response's prefix and its output, including reasoning, are unchanged."""
    note = case.snapshots[response_id]
    if normal_form.normalize_visible(case.turn)[: len(note.visible)] != note.visible:
        return False
    return response_output(case.turn, response_id, len(note.visible)) == note.output


def response_output(turn: Turn, response_id: str, end: int) -> list[object]:
    """Return a response's output before visible block number ``end``, including reasoning."""
    forms: list[object] = []
    for block in turn.body:
        if not end:
            break
        if not isinstance(block, ReasoningBlock):
            end -= 1
            forms.append(normal_form.normalize_block(block))
        elif block.response_id == response_id:
            forms.append(block.content)
    return forms
