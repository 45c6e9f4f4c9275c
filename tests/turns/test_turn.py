"""Operations of Turns compared with a plain list, cached values, immutability, and changes between Turns."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, permutations, product
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import strategies
from for_each import for_each
from kedge import turns
from kedge.errors import InvalidSetting, InvalidTurn
from kedge.planning.digests import prefix_digest
from kedge.turns import (
    Block,
    Source,
    Turn,
    TurnDiff,
    assistant,
    diff,
    dumps,
    new_blocks_not_in,
    snapshot_block_ids,
    system,
    user,
)
from kedge.turns.turn import cache_index, count_leading, get_cached_index, has_prefix
from strategies import blocks, json_objects, scale_examples

FEW_IDS = st.sampled_from("abcdefgh")
SMALL = st.builds(lambda make, id_: make("text", id=id_), st.sampled_from([user, system]), FEW_IDS)


def read_cached(turn: Turn) -> tuple[object, int]:
    """Return the value cached for a Turn, and how many blocks of its body it describes."""
    value, described = get_cached_index(turn)
    return value, min(described, turn.body_length)


class TurnsAgainstLists(RuleBasedStateMachine):
    """A state machine that compares a family of growing and forking Turns with lists.

    A pair is a Turn and the list that it must equal; old pairs stay in the bundle, so that forks and
    continuations of old Turns are as frequent as appends. ``derive`` does what planning does: it caches a
    value that is derived from every block of the body.
    """

    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.family: list[tuple[Turn, list[Block]]] = []

    def add_pair(self, turn: Turn, model: list[Block]) -> tuple[Turn, list[Block]]:
        self.family.append((turn, model))
        return turn, model

    @rule(target=pairs, members=st.lists(SMALL, max_size=4, unique_by=lambda block: block.id))
    def begin(self, members: list[Block]) -> Any:
        return self.add_pair(Turn(members), members)

    @rule(target=pairs, pair=pairs, members=st.lists(SMALL, max_size=3))
    def append(self, pair: Any, members: list[Block]) -> Any:
        return self.attempt(pair, [*pair[1], *members], lambda turn: turn.append(*members))

    @rule(target=pairs, pair=pairs, index=st.integers(-12, 12), block=SMALL)
    def insert(self, pair: Any, index: int, block: Block) -> Any:
        expected = list(pair[1])
        expected.insert(index, block)
        return self.attempt(pair, expected, lambda turn: turn.insert(index, block))

    @rule(target=pairs, pair=pairs, index=st.integers(0, 9), block=SMALL)
    def replace(self, pair: Any, index: int, block: Block) -> Any:
        old = self.id_at(pair, index)
        expected = [block if each.id == old else each for each in pair[1]]
        known = any(each.id == old for each in pair[1])
        return self.attempt(pair, expected, lambda turn: turn.edit(old, block), known=known)

    @rule(target=pairs, pair=pairs, index=st.integers(0, 9))
    def remove(self, pair: Any, index: int) -> Any:
        old = self.id_at(pair, index)
        expected = [each for each in pair[1] if each.id != old]
        known = len(expected) < len(pair[1])
        return self.attempt(pair, expected, lambda turn: turn.remove(old), known=known)

    @rule(target=pairs, pair=pairs, count=st.integers(0, 9))
    def take(self, pair: Any, count: int) -> Any:
        return self.attempt(pair, pair[1][:count], lambda turn: turn.take(count))

    @rule(target=pairs, pair=pairs, data=json_objects())
    def with_data(self, pair: Any, data: Any) -> Any:
        return self.attempt(pair, list(pair[1]), lambda turn: turn.with_data(data))

    @rule(pair=consumes(pairs))
    def forget(self, pair: Any) -> None:
        """Drop a pair from the bundle."""

    @rule(pair=pairs)
    def derive(self, pair: Any) -> None:
        turn, body = pair[0], pair[0].body
        value, retained = read_cached(turn)
        derived = cast("tuple[Block, ...]", value or ())
        cache_index(turn, derived[:retained] + body[retained:])

    def id_at(self, pair: Any, index: int) -> str:
        return pair[1][index].id if index < len(pair[1]) else "nowhere"

    def attempt(self, pair: Any, expected: list[Block], act: Any, *, known: bool = True) -> Any:
        turn, model = pair
        ids = [block.id for block in expected]
        if known and len(set(ids)) == len(ids):
            return self.add_pair(act(turn), expected)
        with pytest.raises(InvalidTurn):
            act(turn)
        return turn, model

    @invariant()
    def every_turn_equals_its_list(self) -> None:
        for turn, model in self.family:
            expected = list(map(id, model))
            assert list(map(id, turn.blocks)) == list(map(id, turn)) == expected
            assert [id(turn[index]) for index in range(-len(turn), 0)] == expected
            assert turn.lead == count_leading(tuple(model))
            assert list(map(id, [*turn.leading, *turn.body])) == expected

    @invariant()
    def cached_values_match_the_blocks(self) -> None:
        for turn, _ in self.family:
            value, retained = read_cached(turn)
            derived = cast("tuple[Block, ...]", value or ())
            assert list(map(id, derived[:retained])) == list(map(id, turn.body[:retained]))


TurnsAgainstLists.TestCase.settings = settings(
    max_examples=scale_examples(30), stateful_step_count=30
)


class TestTurnsAgainstLists(TurnsAgainstLists.TestCase):
    """Random sequences of operations on Turns, compared with lists."""


def test_slices_and_indices_match_a_tuple() -> None:
    """Slices and indices match those of a tuple, also of a Turn that was continued."""
    turn = Turn([user(name, id=name) for name in "abcd"])
    longer = turn.append(user("e", id="e"))
    bounds = (None, *range(-6, 7))
    for each in (turn, longer):
        for start, stop, step in product(bounds, bounds, (None, 1, 2, -1)):
            part = slice(start, stop, step)
            assert each[part] == each.blocks[part]
    for index in (4, -5):
        with pytest.raises(IndexError):
            turn[index]


def test_insert_remove_and_truncate_several_blocks() -> None:
    """Several blocks can be inserted, removed or truncated in one call."""
    turn = Turn([user(name, id=name) for name in "abcd"])
    more = turn.insert(1, user("x", id="x"), user("y", id="y"))
    assert "".join(block.id for block in more) == "axybcd"
    assert more.remove("x", "y", "x") == turn == turn.remove()
    with pytest.raises(InvalidTurn, match="no block with the id 'z'"):
        turn.remove("a", "z")
    truncated = [turn.truncate(length) for length in ("b", 2, -2, 9, -9, 0)]
    assert [len(each) for each in truncated] == [2, 2, 2, 4, 0, 0]
    with pytest.raises(InvalidTurn, match="no block with the id 'z'"):
        turn.truncate("z")


def test_blocks_are_found_by_themselves_and_by_their_ids() -> None:
    """Methods that take the id of a block take the block, too, also an earlier version of it."""
    turn = Turn([user(name, id=name) for name in "abcd"])
    second = turn[1]
    assert turn.index(second) == 1
    edited = turn.edit(second, user("B", id="b"))
    assert edited == turn.edit("b", user("B", id="b"))
    assert edited.index(second) == 1
    assert turn.remove(second, turn[3]) == turn.remove("b", "d")
    assert turn.truncate(second) == turn.truncate("b")
    with pytest.raises(InvalidTurn, match="no block with the id 'z'"):
        turn.remove(user("z", id="z"))


untyped: Any = turns  # the same module, untyped
INVALID_CALLS: list[tuple[Any, str]] = [
    (lambda _: untyped.Turn(5), "a Turn must have blocks, not int"),
    (lambda _: untyped.Turn([], id=5), "id: expected a string, got int"),
    (
        lambda _: untyped.Turn([], data={"a": {"b": {1}}}),
        "data.a.b: a value of type set is not JSON",
    ),
    (lambda _: untyped.Turn([], extra={"blocks": []}), "extra holds 'blocks'"),
    (lambda turn: turn.append("text"), "a Turn must have blocks, not str; use kedge.user"),
    (lambda turn: turn.append(untyped.image("data:,")), "put it into a message: user"),
    (lambda turn: turn.append({"role": "user"}), "not dict; use kedge.wire.blocks_from_messages"),
    (lambda turn: turn.edit("zz", user("b")), "no block with the id 'zz' in turn_1"),
    (lambda turn: turn.index("zz"), "no block with the id 'zz' in turn_1"),
    (lambda _: Turn([user("x", id="b"), user("y", id="b")]), "two blocks have the id 'b'"),
    (lambda turn: turn.append(user("x", id="a")), "two blocks have the id 'a'"),
    (lambda turn: turn.take(-1), "cannot take -1 blocks"),
    (lambda turn: turn.with_data(a=float("nan")), "$.a: nan is not a JSON number"),
]


@for_each(("act", "message"), INVALID_CALLS)
def test_invalid_operation_is_rejected(act: Any, message: str) -> None:
    """An invalid operation raises ``InvalidTurn`` and leaves the Turn unchanged."""
    turn = Turn([user("a", id="a")], id="turn_1")
    with pytest.raises(InvalidTurn) as error:
        act(turn)
    assert message in str(error.value)
    assert turn.blocks == (user("a"),)


def test_with_data_returns_a_new_turn() -> None:
    """``with_data`` sets and removes members, and leaves the blocks, the id and other data unchanged."""
    turn = Turn([user("a")], id="t", data={"a": 1, "null": None}, extra={"new": 1})
    other = turn.with_data({"odd key": [1]}, b=2, a=None)
    assert other.data == {"null": None, "odd key": [1], "b": 2}
    assert (other.id, other.blocks, other.extra) == ("t", turn.blocks, {"new": 1})
    assert turn.data == {"a": 1, "null": None}
    longer = other.append(user("b"))
    assert (longer.data, longer.extra, longer.id) == (other.data, other.extra, "t")
    assert len(turn.append(user("c"))) == len(other.append(user("d"))) == 2


def test_turn_cannot_be_modified() -> None:
    """Assignment, deletion, a second ``__init__`` and changes to the arguments do not change a Turn."""
    members = [user("a")]
    data: dict[str, Any] = {"list": [1]}
    turn = Turn(members, data=data)
    members.append(user("b"))
    data["list"].append(2)
    attempts: list[Any] = [
        lambda: setattr(turn, "blocks", ()),
        lambda: setattr(turn, "id", "x"),
        lambda: turn.__setitem__(0, user("b")),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: turn.data.update(a=1),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: turn.data["list"].append(2),
        lambda: turn.__setstate__({}),  # pyright: ignore[reportAttributeAccessIssue]
    ]
    for attempt in attempts:
        with pytest.raises((AttributeError, TypeError)):
            attempt()
    turn.__init__([user("b")])  # pyright: ignore[reportCallIssue]
    assert turn.blocks == (user("a"),)
    assert turn.data == {"list": [1]}
    with pytest.raises(TypeError, match="cannot have subclasses"):
        type("Mine", (Turn,), {})


@given(strategies.turns())
def test_copies_and_pickles_are_equal(turn: Turn) -> None:
    """Copying a Turn returns the Turn itself, and a pickle has its ids, data and extra but no cache."""
    assert copy.copy(turn) is turn
    assert copy.deepcopy(turn) is turn
    unpickled = pickle.loads(pickle.dumps(turn))  # noqa: S301 - our own bytes
    assert unpickled == turn
    assert dumps(unpickled) == dumps(turn)
    assert get_cached_index(unpickled) == (None, 0)


@given(st.lists(blocks(), max_size=4, unique_by=lambda block: block.id))
def test_turns_are_equal_if_their_blocks_are(members: list[Block]) -> None:
    """Equality ignores ids and data, but not the order of the blocks."""
    one, other = Turn(members, data={"a": 1}), Turn(members)
    assert one == other
    assert hash(one) == hash(other)
    assert one.id != other.id
    assert (Turn(members[::-1]) == one) == (members[::-1] == members)
    assert one != members


def test_newer_blocks_are_found_by_id() -> None:
    """A snapshot of ids identifies blocks added later, even if they equal older ones."""
    turn = Turn([user("a"), user("b")])
    before = snapshot_block_ids(turn)
    extended = turn.insert(1, user("a")).append(assistant("c"))
    assert new_blocks_not_in(extended, before) == [user("a"), assistant("c")]
    assert new_blocks_not_in(turn, before) == []
    assert new_blocks_not_in(turn, iter(list(before)[:1])) != []
    assert before == {block.id for block in turn}


def test_threads_that_extend_one_turn_are_independent() -> None:
    """Eight threads append a shared block and their own to one Turn at the same time."""
    shared = user("shared", id="shared")
    start = threading.Barrier(8)

    def grow(number: int) -> list[Turn]:
        versions: list[Turn] = []
        for root in roots:
            start.wait(300)
            line = root.append(shared).append(user("mine", id=f"{number}"))
            versions.append(line.insert(1, user("inserted", id="inserted")))
        return versions

    roots = [Turn([user("root", id="root")]) for _ in range(50)]
    with ThreadPoolExecutor(8) as pool:
        lines = list(pool.map(grow, range(8)))
    for number, line in enumerate(lines):
        expected = ["root", "inserted", "shared", f"{number}"]
        assert all([block.id for block in turn] == expected for turn in line)


@given(st.lists(st.integers(0, 5), unique=True), st.lists(st.integers(0, 5), unique=True))
def test_with_blocks_replaces_all_blocks(before: list[int], after: list[int]) -> None:
    """``with_blocks`` replaces all blocks, retains the id and data, and leaves no stale digest."""
    pool = [system("s"), system("t"), *(user(str(i)) for i in range(4))]
    turn = Turn([pool[i] for i in before], data={"k": 1})
    prefix_digest(turn)
    changed = turn.with_blocks(pool[i] for i in after)
    assert changed.blocks == tuple(pool[i] for i in after)
    assert (changed.id, changed.data["k"]) == (turn.id, 1)
    assert prefix_digest(changed) == prefix_digest(Turn(changed.blocks))


def test_operations_without_effect_return_the_turn() -> None:
    """A Turn that does not change stays the identical one, by which callers recognize it."""
    turn = Turn([system("s"), user("a")])
    unchanged = (
        turn.append(),
        turn.insert(1),
        turn.remove(),
        turn.take(2),
        turn.with_blocks(turn.blocks),
    )
    assert all(each is turn for each in unchanged)


def test_has_prefix_compares_identical_blocks() -> None:
    """``has_prefix`` compares blocks by identity, not by content."""
    start = Turn([user("a"), user("b")])
    longer, other = start.append(user("c")), start.append(user("d"))
    assert has_prefix(longer, start)
    assert has_prefix(start, start)
    assert has_prefix(other, start)
    assert not has_prefix(other, longer)
    assert not has_prefix(start, longer)
    assert has_prefix(Turn([*longer]), start)
    assert not has_prefix(Turn([user("a"), user("b")]), start)


def test_a_diff_compares_members_of_items() -> None:
    """A block whose item has another value of a member such as ``phase`` is modified."""
    one, other = (assistant("Hi", id="a", extra={"item": {"phase": each}}) for each in "xy")
    assert len(diff(Turn([one]), Turn([other])).modified) == 1


def test_a_text_edits_a_user_block() -> None:
    """A text is a new user block, as in a conversation; other kinds of blocks need a block."""
    turn = Turn([user("One", id="a"), assistant("Two", id="b")])
    assert turn.edit("a", "Uno").blocks[0] == user("Uno")
    with pytest.raises(InvalidSetting, match="a block of kind 'assistant'"):
        turn.edit("b", "Due")


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
    both = [(old_texts[id_], now[id_]) for id_ in now if id_ in old_texts]
    changed = [(one, other) for one, other in both if one != other]
    assert [(one.text, other.text) for one, other in changes.modified] == changed  # pyright: ignore[reportAttributeAccessIssue]
    moved = {block.id for block in changes.moved}
    assert moved <= old_texts.keys() & now.keys()
    unmoved = [id_ for id_ in old_texts if id_ in now and id_ not in moved]
    assert unmoved == [id_ for id_ in now if id_ in old_texts and id_ not in moved]
    assert bool(changes) == (before != after)


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


def test_only_the_kind_and_the_content_of_a_block_count() -> None:
    """A block that an engine has tagged is not reported as changed; one of another kind is."""
    old = Turn([user("a", id="x"), assistant("b")])
    assert diff(old, old.edit(old[1].id, old[1].with_source(Source("resp_1")))) == TurnDiff()
    assert not TurnDiff()
    changes = diff(old, old.edit("x", assistant("a", id="x")))
    assert changes.modified == ((user("a"), assistant("a")),)


def test_diff_string_has_one_line_per_change() -> None:
    """The string form of a diff has one line per change, with the block and one of the signs ``+ - ~ >``."""
    old = make_turn([(id_, id_) for id_ in "abcd"])
    new = make_turn([("e", "e"), ("c", "c"), ("d", "d"), ("b", "B")])
    lines = ["+ <user e>", "- <user a>", "~ <user b> -> <user B>", "> <user B>"]
    assert str(diff(old, new)).splitlines() == lines
    assert str(diff(old, old)) == "no difference"
