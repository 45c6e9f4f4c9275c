"""Immutable dataclasses, and the local ids of their values.

``@dataclass(frozen=True)`` rejects assignments, but a value can still be changed in two ways: by a second call of
``__init__``, and by the ``__setstate__`` that it adds for pickling. ``immutable`` prevents both: the fields are
set in ``__new__``, which always creates a new object, and pickling uses the fields, which are checked again when
they are loaded. A copy of an immutable value is the value itself. The classes are a closed set, so that a
``match`` on them is exhaustive.

A class that is constructed often defines ``__new__`` itself, which is twice as fast as calling the
``__init__`` that dataclasses generate. Frozen dataclasses with many fields use ``kedge.frozen_dataclasses``.

A local id consists of a nanosecond timestamp that increases with every id of a process, and 40 random bits that
identify the process. It is never sent to a provider.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from itertools import repeat
from typing import Any, NoReturn, TypeVar

from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import FrozenMap, check_text, freeze_map

T = TypeVar("T")

set_field = object.__setattr__
"""Set a field of a frozen dataclass while it is constructed."""


def build_instances(cls: type[T], count: int, **columns: Iterable[object]) -> list[T]:
    """Return instances of a slotted class whose fields the caller has checked, without calling its constructor.

    Setting the fields column by column takes a third of the time of a generated constructor.

    Args:
        cls: The class.
        count: The number of instances.
        **columns: For every field, its value in each instance.
    """
    instances = list(map(object.__new__, repeat(cls, count)))
    for name, values in columns.items():
        set_value: Callable[[T, object], None] = getattr(cls, name).__set__
        deque(map(set_value, instances, values), maxlen=0)
    return instances


def immutable(cls: type[T]) -> type[T]:
    """Make a frozen, slotted dataclass immutable; see the module docstring.

    Args:
        cls: A dataclass, whose fields are set by its ``__new__`` or by its generated ``__init__``.

    Returns:
        The same class.
    """

    def reject_subclass(subclass: type[object]) -> None:
        if subclass.__module__ != cls.__module__:
            raise TypeError(
                f"{cls.__name__} cannot have subclasses outside of Kedge; use kedge.opaque for items "
                "that Kedge does not know"
            )

    if "__new__" not in vars(cls):
        type.__setattr__(cls, "__new__", _build_new(cls))
    for name, method in (
        ("__init__", object.__init__),
        ("__init_subclass__", classmethod(reject_subclass)),
        ("__setstate__", reject_change),
        ("__copy__", _return_self),
        ("__deepcopy__", _return_self),
        ("__reduce__", _reduce),
    ):
        setattr(cls, name, method)
    return cls


def reject_change(value: object, *_: object) -> NoReturn:
    """Raise because this value is immutable."""
    raise AttributeError(f"a {type(value).__name__} is immutable; use dataclasses.replace")


def freeze_extra(value: Any, tag: str) -> None:
    """Freeze ``extra``, which must not contain fields of the value, because they share one JSON object."""
    extra: FrozenMap = freeze_map(value.extra, "extra")
    set_field(value, "extra", extra)
    if own_fields := _member_names(value.__class__, tag) & extra.keys():
        raise InvalidTurn(
            f"extra holds {min(own_fields)!r}, which is a field of its own; set that instead"
        )


def check_text_field(value: Any, name: str, text: object) -> None:
    """Check a text field, and set it to the checked value if it is not plain ASCII."""
    if type(text) is not str or not text.isascii():
        set_field(value, name, check_text(text, name))


@cache
def _member_names(cls: type[Any], tag: str) -> frozenset[str]:
    names = (each.name for each in fields(cls) if each.init and each.name != "extra")
    return frozenset((tag, *names))


def _build_new(cls: type[Any]) -> Callable[..., Any]:
    """Return a ``__new__`` that does the work of the ``__init__`` of a dataclass."""
    init = cls.__init__

    @wraps(init)
    def __new__(cls: type[Any], *args: Any, **members: Any) -> Any:  # noqa: N807
        self = object.__new__(cls)
        init(self, *args, **members)
        return self

    return __new__


def _return_self(value: T, *_: object) -> T:
    return value


def _reduce(value: Any) -> tuple[Any, ...]:
    members = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    return _rebuild, (type(value), members)


def _rebuild(cls: type[T], members: Mapping[str, Any]) -> T:
    return cls(**members)


_lock = threading.Lock()
_last_tick = 0
_process_bits = secrets.randbits(40)
_SPREAD = 0x9E3779B97F4A7C15
"""An odd constant: products of consecutive ticks with it differ in all digits."""


def new_id(prefix: str) -> str:
    """Generate an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``.

    Ids start with the time, so they are ordered. They end with random bits of the process, mixed with the
    time: the last digits of two ids differ also within a process, because lists show only these.

    Args:
        prefix: The part before the underscore.

    Returns:
        The id.
    """
    global _last_tick  # noqa: PLW0603 - one clock for the process
    with _lock:
        tick = time.time_ns()
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    mixed = (_process_bits + (tick * _SPREAD >> 24)) & 0xFF_FFFF_FFFF
    return f"{prefix}_{tick:016x}{mixed:010x}"


def _reset_after_fork() -> None:
    """Set new random bits and an unlocked lock in a forked process."""
    global _lock, _process_bits  # noqa: PLW0603 - they belong to the process
    _lock = threading.Lock()
    _process_bits = secrets.randbits(40)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
