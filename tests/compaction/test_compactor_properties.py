"""Properties that every compactor has for any history."""

from hypothesis import given
from hypothesis import strategies as st

from compaction.histories import FunctionEngine, histories, pairing_problems, run_immediately
from kedge.compaction import (
    CompactionRequest,
    Compactor,
    CompositeCompactor,
    MessageLimitCompactor,
    SplitCompactor,
    SummarizingCompactor,
    TokenLimitCompactor,
    ToolExchangeCompactor,
    run_compactor,
)
from kedge.turns import Block, UserBlock

SUMMARY_ENGINE = FunctionEngine(lambda _: "short")


class AlwaysTrigger:
    """A trigger that always fires."""

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return true."""
        return True


def compactors() -> st.SearchStrategy[Compactor]:
    """Return a strategy for compactors with small limits."""
    limits = st.integers(1, 60)
    leaves = st.one_of(
        limits.flatmap(
            lambda maximum: st.integers(1, maximum).map(
                lambda target: MessageLimitCompactor(maximum, target)
            )
        ),
        st.integers(1, 900).flatmap(
            lambda maximum: st.integers(1, maximum).map(
                lambda target: TokenLimitCompactor(maximum, target)
            )
        ),
        st.builds(
            ToolExchangeCompactor,
            st.integers(10, 200),
            keep_exchanges=st.integers(1, 3),
            min_saving=st.integers(1, 200),
        ),
        st.integers(2, 900).map(
            lambda maximum: SummarizingCompactor(maximum, engine=SUMMARY_ENGINE)
        ),
        limits.map(lambda maximum: SplitCompactor(AlwaysTrigger(), MessageLimitCompactor(maximum))),
    )
    return st.one_of(
        leaves, st.lists(leaves, max_size=3).map(lambda parts: CompositeCompactor(*parts))
    )


def retained_indexes(before: tuple[Block, ...], after: tuple[Block, ...]) -> list[int]:
    """Return the indexes in the old history of the blocks that are also in the new one."""
    positions = {block.id: index for index, block in enumerate(before)}
    return [positions[block.id] for block in after if block.id in positions]


@given(histories(), compactors())
def test_compaction_preserves_pairs_order_and_blocks(
    blocks: tuple[Block, ...], compactor: Compactor
) -> None:
    """No pair is split, nothing is reordered, and an unchanged block is the same object."""
    result = run_immediately(run_compactor(compactor, CompactionRequest(blocks)))
    assert pairing_problems(result.blocks) <= pairing_problems(blocks)
    positions = retained_indexes(blocks, result.blocks)
    assert positions == sorted(positions)
    modified = {new.id for _, new in result.changes.modified}
    before = {block.id: block for block in blocks}
    for block in result.blocks:
        if block.id in before and block.id not in modified:
            assert block is before[block.id]
    assert not any("failed" in note for note in result.notes)


@given(histories(), compactors())
def test_cut_history_starts_with_a_user_block(
    blocks: tuple[Block, ...], compactor: Compactor
) -> None:
    """After blocks are removed the history starts with a user block and ends with the newest exchange."""
    result = run_immediately(run_compactor(compactor, CompactionRequest(blocks)))
    if result.removed:
        assert isinstance(result.blocks[0], UserBlock)
        newest = max(i for i, block in enumerate(blocks) if isinstance(block, UserBlock))
        assert result.blocks[-(len(blocks) - newest) :] == blocks[newest:]


@given(histories(), compactors())
def test_compaction_is_idempotent(blocks: tuple[Block, ...], compactor: Compactor) -> None:
    """Compacting an already compacted history changes nothing."""
    first = run_immediately(run_compactor(compactor, CompactionRequest(blocks)))
    if not first.notes and not _has_summarizer(compactor):
        second = run_immediately(run_compactor(compactor, CompactionRequest(first.blocks)))
        assert second.blocks == first.blocks


def _has_summarizer(compactor: Compactor) -> bool:
    if isinstance(compactor, CompositeCompactor):
        return any(map(_has_summarizer, compactor.compactors))
    return isinstance(compactor, SummarizingCompactor)


@given(histories(), st.integers(1, 30))
def test_a_message_limit_is_met_or_reported(blocks: tuple[Block, ...], maximum: int) -> None:
    """The number of blocks is within the limit, unless the newest exchange alone exceeds it."""
    result = run_immediately(
        run_compactor(MessageLimitCompactor(maximum), CompactionRequest(blocks))
    )
    assert len(result.blocks) <= maximum or result.notes


@given(histories(), st.integers(1, 600), st.data())
def test_a_token_target_is_met_or_reported(
    blocks: tuple[Block, ...], maximum: int, data: st.DataObject
) -> None:
    """A history above the limit is cut to the target, unless the newest exchange alone exceeds it."""
    target = data.draw(st.integers(1, maximum))
    request = CompactionRequest(blocks)
    result = run_immediately(run_compactor(TokenLimitCompactor(maximum, target), request))
    if request.size() <= maximum:
        assert result.blocks == blocks
    else:
        assert request.count(result.blocks) <= target or result.notes
        if result.changed:
            assert result.tokens_before == request.size()
            assert result.tokens_after == request.count(result.blocks)
