"""Tests of the comparison of paths: by content, aligned, and word by word."""

from kedge.turns import assistant, system, tool_call, tool_result, user
from kedge.web.block_diff import (
    MAX_BLOCKS,
    MAX_PAGE_WORDS,
    MAX_WORDS,
    build_diff,
    describe_first_change,
    pair_edits,
)


def test_changed_words_are_marked() -> None:
    """A message whose text was changed has its words marked, and equal messages have other ids."""
    left = [user("What is 2+3?"), assistant("5"), user("Thanks a lot")]
    right = [user("What is 2+4?"), assistant("5"), user("Thanks a lot")]
    (changed, same), common = build_diff(left, right)
    assert (changed.kind, same.kind, common) == ("changed", "same", 2)
    assert str(changed.left[0].html) == '<p class="words">What is 2+<del>3</del>?</p>'
    assert str(changed.right[0].html) == '<p class="words">What is 2+<ins>4</ins>?</p>'


def test_long_texts_without_common_words_are_marked_as_a_whole() -> None:
    """Words that are frequent in a long text do not make the comparison slow."""
    one, other = (" ".join(f"{name}{number}" for number in range(900)) for name in "ab")
    ((row,), _) = build_diff([user(one)], [user(other)])
    assert str(row.left[0].html) == f'<p class="words"><del>{one}</del></p>'
    assert str(row.right[0].html) == f'<p class="words"><ins>{other}</ins></p>'


def test_spaces_belong_to_the_word_before() -> None:
    """Another space or line break after the same word is no change."""
    ((row,), _) = build_diff([user("a b c")], [user("a\nb d")])
    assert str(row.left[0].html) == '<p class="words">a b <del>c</del></p>'
    assert str(row.right[0].html) == '<p class="words">a\nb <ins>d</ins></p>'


def test_blocks_are_aligned_by_content() -> None:
    """Blocks that are only in one path are beside the blocks that are the same in both."""
    left = [system("Be brief."), user("a"), assistant("<b>"), user("c")]
    right = [system("Be brief."), user("a"), user("c"), assistant("d")]
    rows, common = build_diff(left, right)
    assert [row.kind for row in rows] == ["same", "left", "same", "right"]
    assert common == 3
    assert rows[1].left[0].source == "<b>"
    assert build_diff([], []) == ((), 0)


def test_tool_calls_and_long_texts_have_no_word_diff() -> None:
    """Tool calls, and texts or paths above the limits of a text and of the page, are not compared by word."""
    left = [tool_call("add", {"a": 1}, call_id="c"), tool_result("c", "1")]
    right = [tool_call("add", {"a": 2}, call_id="c"), tool_result("c", "1")]
    (changed, _), _ = build_diff(left, right)
    assert changed.kind == "changed"
    long = " ".join(["word"] * MAX_WORDS)
    (row,), _ = build_diff([user(long)], [user(long + " more")])
    assert "<ins>" not in str(row.right[0].html)
    many = [user(str(number)) for number in range(MAX_BLOCKS + 1)]
    rows, common = build_diff(many, [user("x"), user("y")])
    assert ([row.kind for row in rows[:3]], common) == (["changed", "changed", "left"], 0)
    left = [user(f"{number} " + "a " * 1_900) for number in range(20)]
    right = [user(f"x{number} " + "a " * 1_900) for number in range(20)]
    rows, _ = build_diff(left, right)
    marked = ["<ins>" in str(row.right[0].html) for row in rows]
    assert sum(marked) == MAX_PAGE_WORDS // 1_901
    assert marked == sorted(marked, reverse=True)


def test_edits_are_paired_with_previous_text() -> None:
    """Edits are paired by their position between unchanged blocks; an insertion is not an edit."""
    old, new = user("old"), user("new")
    before = [user("a"), old, assistant("b")]
    assert pair_edits(before, [before[0], new, before[2]]) == {new.id: "old"}
    assert pair_edits(before, [*before, user("c")]) == {}
    assert pair_edits(before, [before[0], assistant("x"), before[2]]) == {}


def test_first_change_is_described() -> None:
    """The first changed, removed or inserted message is described; an appended one is no change."""
    before = [user("a"), assistant("b"), user("c")]
    assert describe_first_change(before, [*before, user("d")]) == ""
    assert describe_first_change(before, [before[0], user("x"), *before[1:]]) == (
        "The first change: new user message “x”."
    )
    assert describe_first_change(before, [before[0], before[2]]) == (
        "The first change: removed answer “b”."
    )
    assert describe_first_change(before, [user("z"), *before[1:]]) == (
        "The first change: user message “a” → “z”."
    )
