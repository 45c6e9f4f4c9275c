"""``diff``: the changes between two Turns."""

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from kedge.turns import Block, Source, Turn, TurnDiff, assistant, diff, user

CONTENTS = st.dictionaries(st.sampled_from("abcdefg"), st.sampled_from(["x", "y"]))
ORDERED = CONTENTS.flatmap(lambda contents: st.permutations(list(contents.items())))


def make_turn(contents: list[tuple[str, str]]) -> Turn:
    return Turn(user(text, id=id_) for id_, text in contents)


@given(ORDERED, ORDERED)
def test_a_diff_lists_all_changes(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    """Blocks are added, removed or modified by id, and the order is unchanged apart from the moved ones."""
    old, new = make_turn(before), make_turn(after)
    changes = diff(old, new)
    old_texts, now = dict(before), dict(after)
    assert [block.id for block in changes.added] == [id_ for id_ in now if id_ not in old_texts]
    assert [block.id for block in changes.removed] == [id_ for id_ in old_texts if id_ not in now]
    changed = [
        (old_texts[id_], now[id_]) for id_ in now if id_ in old_texts and old_texts[id_] != now[id_]
    ]
    assert [(one.text, other.text) for one, other in changes.modified] == changed  # pyright: ignore[reportAttributeAccessIssue]
    moved = {block.id for block in changes.moved}
    assert moved <= old_texts.keys() & now.keys()
    unmoved = [id_ for id_ in old_texts if id_ in now and id_ not in moved]
    assert unmoved == [id_ for id_ in now if id_ in old_texts and id_ not in moved]
    assert bool(changes) == (before != after)


@given(ORDERED, ORDERED)
def test_applying_a_diff_gives_the_new_turn(
    before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    """Applying a diff to the old Turn gives the new one."""
    old, new = make_turn(before), make_turn(after)
    changes = diff(old, new)
    turn = old
    for block in (*changes.removed, *changes.moved):
        turn = turn.remove(block.id)
    for _, block in changes.modified:
        if block.id in {each.id for each in turn}:
            turn = turn.edit(block.id, block)
    placed: dict[str, Block] = {block.id: block for block in (*changes.added, *changes.moved)}
    for index, block in enumerate(new):
        if block.id in placed:
            turn = turn.insert(index, placed[block.id])
    assert turn == new


def test_a_diff_has_the_fewest_moved_blocks() -> None:
    """For every permutation of six blocks, the number of moved blocks is minimal."""
    ids = "abcdef"
    old = make_turn([(id_, "x") for id_ in ids])
    for order in permutations(ids):
        changes = diff(old, make_turn([(id_, "x") for id_ in order]))
        longest = next(
            size
            for size in range(len(ids), 0, -1)
            if any(list(run) == sorted(run) for run in combinations(order, size))
        )
        assert len(changes.moved) == len(ids) - longest
        assert changes == TurnDiff(moved=changes.moved)


def test_metadata_is_ignored() -> None:
    """A block that an engine has tagged is not reported as changed."""
    old = Turn([user("a"), assistant("b")])
    new = old.edit(old[1].id, old[1].with_source(Source("resp_1")))
    assert not diff(old, new)
    assert diff(old, new) == TurnDiff()


def test_block_of_another_kind_with_the_same_id_is_modified() -> None:
    """A block with the same id but another kind is reported as modified."""
    changes = diff(Turn([user("a", id="x")]), Turn([assistant("a", id="x")]))
    assert changes.modified == ((user("a"), assistant("a")),)


def test_diff_string_has_one_line_per_change() -> None:
    """The string form of a diff has one line per change, with the block and one of the signs ``+ - ~ >``."""
    old = Turn([user("a", id="a"), user("b", id="b"), user("c", id="c"), user("d", id="d")])
    new = Turn([user("e", id="e"), user("c", id="c"), user("d", id="d"), user("B", id="b")])
    assert str(diff(old, new)).splitlines() == [
        "+ <user e>",
        "- <user a>",
        "~ <user b> -> <user B>",
        "> <user B>",
    ]
    assert str(diff(old, old)) == "no difference"
