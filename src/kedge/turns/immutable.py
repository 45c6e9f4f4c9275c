"""Sealing: what makes a frozen dataclass immutable for good.

``@dataclass(frozen=True)`` stops assignments, but leaves two doors open: a second call of ``__init__``,
and the ``__setstate__`` that it adds for pickling. ``sealed`` shuts both: the members are set in
``__new__``, which only ever sees a new object (and sets slots directly, which is quicker), and
pickling goes by the members, which are checked again when they come back. A sealed value is its own
copy. Its classes are a closed set, so that whoever matches on them has seen them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NoReturn, TypeVar

from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import FrozenMap, check_text, freeze_map

T = TypeVar("T")

set_field = object.__setattr__
"""How a frozen dataclass sets a member of its own in ``__post_init__``."""


def immutable(cls: type[T]) -> type[T]:
    """Seal a frozen, slotted dataclass that has a ``__post_init__``."""

    def refuse_strangers(subclass: type[object]) -> None:
        if subclass.__module__ != cls.__module__:
            raise TypeError(f"{cls.__name__} has no subclasses elsewhere; see kedge.opaque")

    for name, method in (
        ("__new__", _build_new(cls)),
        ("__init__", object.__init__),
        ("__init_subclass__", classmethod(refuse_strangers)),
        ("__setstate__", reject_change),
        ("__copy__", _return_self),
        ("__deepcopy__", _return_self),
        ("__reduce__", _reduce),
    ):
        setattr(cls, name, method)
    return cls


def reject_change(value: object, *_: object) -> NoReturn:
    """Say that this value cannot change."""
    raise AttributeError(f"a {type(value).__name__} cannot change; make a new one")


def freeze_extra(value: Any, tag: str) -> None:
    """Freeze ``extra``, which must leave the value's own members alone: they share a JSON object."""
    extra: FrozenMap = freeze_map(value.extra, "extra")
    set_field(value, "extra", extra)
    if taken := _member_names(value.__class__, tag) & extra.keys():
        raise InvalidTurn(f"extra holds {min(taken)!r}, which is a member of its own")


def check_text_field(value: Any, name: str, text: object) -> None:
    """Check a member that is text; only what is not plain already has to be set again."""
    if type(text) is not str or not text.isascii():
        set_field(value, name, check_text(text, name))


@cache
def _member_names(cls: type[Any], tag: str) -> frozenset[str]:
    own = (each.name for each in fields(cls) if each.init and each.name != "extra")
    return frozenset((tag, *own))


def _build_new(cls: type[Any]) -> Callable[..., Any]:
    """Write ``__new__`` as dataclasses write ``__init__``: one argument and one line a member."""
    scope: dict[str, Any] = {"new": object.__new__}
    arguments: list[str] = []
    lines: list[str] = []
    for each in sorted(fields(cls), key=lambda each: each.kw_only is True):
        name = each.name
        scope[f"set_{name}"] = getattr(cls, name).__set__  # the slot of this member
        if each.kw_only and "*" not in arguments:
            arguments.append("*")
        if each.default is not MISSING:
            scope[f"default_{name}"] = each.default
        if each.init:
            arguments.append(name if each.default is MISSING else f"{name}=default_{name}")
        lines.append(f" set_{name}(self, {name if each.init else f'default_{name}'})\n")
    source = f"def __new__(cls, {', '.join(arguments)}):\n self = new(cls)\n{''.join(lines)}"
    exec(f"{source} self.__post_init__()\n return self", scope)  # noqa: S102 - our own field names
    return scope["__new__"]


def _return_self(value: T, *_: object) -> T:
    return value


def _reduce(value: Any) -> tuple[Any, ...]:
    members = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    return _rebuild, (type(value), members)


def _rebuild(cls: type[T], members: Mapping[str, Any]) -> T:
    return cls(**members)
