"""Coherence of tool calls, results, ids and reasoning, and the published error for each violation."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.server.coherence import (
    CALL_TYPES,
    EMPTY_COHERENCE,
    OUTPUT_TYPES,
    IdSet,
    ItemLookup,
    check_request,
    resolve_references,
)
from kedge.server.errors import ApiError

Item = dict[str, Any]


class StoredItems:
    """The stored items of a server by id, and the reasoning before each item."""

    def __init__(self, *items: Item, before: dict[str, str] | None = None) -> None:
        self._items = {item["id"]: item for item in items}
        self._before = before or {}

    def find_item(self, id: str) -> Item | None:  # noqa: A002 - name of the protocol
        return self._items.get(id)

    def find_reasoning_before(self, id: str) -> str | None:  # noqa: A002 - name of the protocol
        return self._before.get(id)


NO_ITEMS = StoredItems()
USER: Item = {"role": "user", "content": "hi"}
ASSISTANT: Item = {"role": "assistant", "content": "hello"}


def check_context(
    context: Sequence[Item], new: Sequence[Item], lookup: ItemLookup = NO_ITEMS
) -> None:
    """Check new items against a complete context."""
    check_request(EMPTY_COHERENCE.extend(context), new, lookup)


def make_call(call_id: str = "call_1", **more: Any) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"} | more


def make_output(call_id: str = "call_1", **more: Any) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "ok"} | more


def make_reasoning(item_id: str | None = "rs_1", **more: Any) -> Item:
    return {"type": "reasoning", "summary": [], **({"id": item_id} if item_id else {}), **more}


ENCRYPTED = {"encrypted_content": "gAAA"}

NO_OUTPUT = "No tool output found for function call {}."
NO_CALL = "No tool call found for {} output with call_id {}."

REJECTED: list[tuple[list[Item], list[Item], str]] = [
    # Calls without outputs, and outputs without calls.
    ([], [USER, make_call("call_9")], NO_OUTPUT.format("call_9")),
    ([make_call("a"), make_call("b")], [make_output("a")], NO_OUTPUT.format("b")),
    (
        [],
        [make_output(), make_call()],
        NO_CALL.format("function call", "call_1") + " Its call comes after it.",
    ),
    ([make_call()], [make_output(), make_output()], NO_CALL.format("function call", "call_1")),
    (
        [make_call()],
        [make_output(type="custom_tool_call_output")],
        NO_CALL.format("custom tool call", "call_1")
        + " call_1 is a function_call, whose output has another type.",
    ),
    (
        [make_call(id="fc_2")],
        [make_output("fc_2")],
        NO_CALL.format("function call", "fc_2")
        + " fc_2 is the id of the item of this call; use its call_id, call_1.",
    ),
    (
        [],
        [USER, make_call(id="fc_3"), make_output("fc_3")],
        NO_CALL.format("function call", "fc_3")
        + " fc_3 is the id of the item of this call; use its call_id, call_1.",
    ),
    (
        [*map(make_call, "abcdef"), make_output("a")],
        [make_output("call_9")],
        NO_CALL.format("function call", "call_9") + " Calls without an output: b, c, d, e, f.",
    ),
    (
        [*map(make_call, "abcdefg"), make_output("a")],
        [make_output("call_9")],
        NO_CALL.format("function call", "call_9") + " Calls without an output: b, c, d, e, f, ….",
    ),
    # The item is of another conversation.
    ([], [make_output("fc_2")], NO_CALL.format("function call", "fc_2")),
    ([], [make_output("a"), make_output("b")], NO_CALL.format("function call", "a")),
    ([make_output("call_0")], [USER], NO_CALL.format("function call", "call_0")),
    # Reasoning without its item, and an item without its reasoning.
    (
        [],
        [make_reasoning(**ENCRYPTED), USER],
        "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
    ),
    (
        [],
        [USER, make_call(id="fc_1"), make_output()],
        "Item 'fc_1' of type 'function_call' was provided without its required 'reasoning' item: 'rs_7'.",
    ),
]
"""Context, new items and message; ``test_published_errors.py`` has the violations that a client sees most."""


@for_each(("context", "new", "message"), REJECTED)
def test_incoherent_input_gets_the_published_error(
    context: list[Item], new: list[Item], message: str
) -> None:
    """Each violation has the hosted API's status and message, with ``input`` as the parameter."""
    known = StoredItems(make_call(id="fc_2"), before={"fc_1": "rs_7"})
    with pytest.raises(ApiError) as exc_info:
        check_context(context, new, known)
    error = exc_info.value
    assert (error.status, error.message, error.param, error.code) == (400, message, "input", None)


SHELL = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1"}
WAITING_CALL = make_call() | {"async": True}
THOUGHTS = [make_reasoning("rs_1", **ENCRYPTED), make_reasoning("rs_2", **ENCRYPTED)]

ACCEPTED: list[tuple[list[Item], list[Item]]] = [
    ([], []),
    ([USER, ASSISTANT], []),
    ([USER, make_call()], [make_output()]),
    ([USER, make_call()], [USER, make_output(), USER]),
    ([make_call("a"), make_call("b")], [make_output("b"), make_output("a")]),
    ([], [USER, make_call(), make_output(), ASSISTANT, USER]),
    ([make_call(), make_output(), ASSISTANT], [make_call(), make_output()]),
    ([WAITING_CALL], [USER]),
    ([WAITING_CALL, USER, ASSISTANT], [make_output()]),
    ([make_call(), {"type": "compaction"}], [USER]),
    ([], [USER, make_reasoning(**ENCRYPTED), ASSISTANT, USER]),
    ([], [*THOUGHTS, make_call(), make_output()]),
    ([], [make_reasoning(None), ASSISTANT, USER]),
    ([], [make_reasoning("rs_stored"), ASSISTANT, USER]),
    ([], [make_reasoning("rs_7", **ENCRYPTED), make_call(id="fc_1"), make_output()]),
    ([USER], [USER | {"id": "msg_mine"}]),
    ([SHELL], [make_output(type="local_shell_call_output", id="lsh_1")]),
    ([SHELL], [make_output(type="local_shell_call_output", id="call_1")]),
]


@for_each(("context", "new"), ACCEPTED)
def test_coherent_input_is_accepted(context: list[Item], new: list[Item]) -> None:
    """Coherent input is accepted in every form."""
    known = StoredItems(make_reasoning("rs_stored"), before={"fc_1": "rs_7"})
    check_context(context, new, known)


@for_each("kind", CALL_TYPES)
def test_every_call_type_requires_its_output_type(kind: str) -> None:
    """Each type of client tool call requires an output of its own type with the same id."""
    answers = {call: (name, key) for name, (call, key) in OUTPUT_TYPES.items()}
    name, key = answers[kind]
    one: Item = {"type": kind, **dict.fromkeys(CALL_TYPES[kind], "k1")}
    label = kind.replace("_", " ")
    with pytest.raises(ApiError, match=rf"No tool output found for {label} k1\."):
        check_context([one], [USER])
    check_context([one], [{"type": name, key: "k1"}])
    label = name.replace("_", " ")
    with pytest.raises(ApiError, match=rf"No tool call found for {label} with call_id k2"):
        check_context([one], [{"type": name, key: "k2"}])


def test_reference_is_replaced_by_its_item() -> None:
    """References are replaced by the stored items; other items are unchanged."""
    stored = ASSISTANT | {"id": "msg_1"}
    reference = {"type": "item_reference", "id": "msg_1"}
    resolved = resolve_references([USER, reference, {"id": "msg_1"}], StoredItems(stored))
    assert resolved == [USER, stored, stored]
    with pytest.raises(
        ApiError, match=r"^Item with id 'msg_1' not found\. Items are not"
    ) as exc_info:
        resolve_references([reference], StoredItems())
    assert (exc_info.value.status, exc_info.value.param) == (404, "input")


ids = st.sampled_from(["a", "b", "c"])
items = st.lists(
    st.one_of(
        st.just(USER),
        ids.map(lambda letter: USER | {"id": f"msg_{letter}"}),
        ids.map(make_call),
        ids.map(make_output),
    ),
    max_size=8,
)


def check_parts(parts: Sequence[list[Item]], new: list[Item]) -> str:
    state = EMPTY_COHERENCE
    for part in parts:
        state = state.extend(part)
    try:
        check_request(state, new, NO_ITEMS)
    except ApiError as error:
        return error.message
    return "fits"


@given(context=items, new=items, positions=st.lists(st.integers(0, 8), max_size=3))
def test_context_in_parts_gives_the_same_result(
    context: list[Item], new: list[Item], positions: list[int]
) -> None:
    """The check of new items does not depend on how the context was divided into parts."""
    bounds = [0, *sorted(min(position, len(context)) for position in positions), len(context)]
    parts = [context[i:j] for i, j in pairwise(bounds)]
    assert check_parts(parts, new) == check_parts([context], new)


@given(st.lists(st.lists(st.integers(0, 60).map(str), max_size=6), max_size=60))
def test_id_set_versions_are_immutable(batches: list[list[str]]) -> None:
    """Each version contains exactly the ids that were added up to it."""
    versions = [IdSet()]
    expected_ids = [set[str]()]
    for batch in batches:
        versions.append(versions[-1].add(batch))
        expected_ids.append(expected_ids[-1] | set(batch))
    for version, expected in zip(versions, expected_ids, strict=True):
        assert {str(n) for n in range(61) if str(n) in version} == expected


def test_id_set_of_a_long_chain() -> None:
    """After 100,000 turns, ids of the first and the last one are found, and the set can be dropped."""
    ids = IdSet()
    for turn in range(100_000):
        ids = ids.add([f"msg_{turn}", f"fc_{turn}"])
    assert "msg_0" in ids
    assert "fc_99999" in ids
    assert "msg_100000" not in ids
