"""Frozen dataclasses are constructed fast, and equal to those that are constructed in the usual way."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from typing import Any

import pytest

from kedge.frozen_dataclasses import replace_fields, with_fast_init
from kedge.planning import ConversationState


@dataclass(frozen=True, slots=True)
class Generated:
    """A class with the ``__init__`` that dataclasses generate."""

    text: str
    number: int = 1
    tags: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("empty")


@with_fast_init
@dataclass(frozen=True, slots=True)
class Fast:
    """The same class with the fast one."""

    text: str
    number: int = 1
    tags: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("empty")


class FastWithMore(Fast):
    """A subclass with further attributes."""


def test_the_fast_init_accepts_the_arguments_of_the_generated_one() -> None:
    """The signature, the fields, copies and pickles are those of the generated class."""
    assert inspect.signature(Fast) == inspect.signature(Generated)
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("a",), {}),
        (("a", 2), {"tags": ("x",)}),
        ((), {"text": "a", "number": 3}),
    ]
    for args, members in arguments:
        made: Any = Fast(*args, **members)
        assert type(made) is Fast
        assert asdict(made) == asdict(Generated(*args, **members))
        loaded = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
        assert made == copy.deepcopy(made) == loaded == replace(made)
        assert hash(made) == hash(replace(made))


@pytest.mark.parametrize(
    ("args", "error"), [((), TypeError), (("a", 1, ("x",)), TypeError), (("",), ValueError)]
)
def test_the_fast_init_rejects_what_the_generated_one_rejects(
    args: tuple[Any, ...], error: type[Exception]
) -> None:
    """Wrong arguments and values raise the same errors."""
    for cls in (Generated, Fast):
        with pytest.raises(error):
            cls(*args)


def test_the_fast_init_leaves_a_frozen_object() -> None:
    """Attributes can be neither assigned nor deleted."""
    made: Any = Fast("a")
    with pytest.raises(FrozenInstanceError):
        made.text = "b"
    with pytest.raises(FrozenInstanceError):
        del made.text


def test_a_subclass_uses_the_generated_init() -> None:
    """A subclass has its own type and the same fields."""
    made: Any = FastWithMore("a", tags=("x",))
    assert type(made) is FastWithMore
    assert (made.text, made.number, made.tags) == ("a", 1, ("x",))


def test_replace_fields_equals_replace() -> None:
    """Fields are replaced in a copy, as by `dataclasses.replace`; the value itself does not change."""
    state = ConversationState(previous_response_id="resp_1", conversation_id="conv_1")
    changed = replace_fields(state, previous_response_id="resp_2")
    assert changed == replace(state, previous_response_id="resp_2")
    assert state.previous_response_id == "resp_1"
    with pytest.raises(AttributeError):
        replace_fields(state, unknown=1)
