"""A faster constructor for frozen dataclasses with many fields."""

from dataclasses import MISSING, fields
from functools import update_wrapper
from operator import attrgetter
from typing import Any, TypeVar, cast

T = TypeVar("T")


def with_fast_init(cls: type[T]) -> type[T]:
    """Give a frozen, slotted dataclass an ``__init__`` that takes a third of the time of the generated one.

    The generated one calls ``object.__setattr__`` for every field, because the class rejects assignments. This one
    makes the object an instance of a class with the same slots that accepts them, assigns all fields,
    and restores the class. Subclasses, which may have further slots, use the generated one.

    Args:
        cls: A dataclass without base classes, whose fields are all parameters without default factories.

    Returns:
        The same class.
    """
    members = sorted(fields(cast("Any", cls)), key=attrgetter("kw_only"))
    defaults = {each.name: each.default for each in members if each.default is not MISSING}
    parameters = ["self"]
    for each in members:
        if each.kw_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(each.name + (f"=defaults[{each.name!r}]" * (each.name in defaults)))
    passed = ", ".join(f"{each.name}={each.name}" for each in members)
    lines = [
        f"def __init__({', '.join(parameters)}):",
        "    if self.__class__ is not cls:",
        f"        return generated(self, {passed})",
        "    set_attribute(self, '__class__', assignable)",
        *(f"    self.{each.name} = {each.name}" for each in members),
        "    self.__class__ = cls",
        "    self.__post_init__()" if hasattr(cls, "__post_init__") else "",
    ]
    names: dict[str, Any] = {
        "assignable": type(cls.__name__, (), {"__slots__": tuple(each.name for each in members)}),
        "cls": cls,
        "defaults": defaults,
        "generated": cls.__init__,
        "set_attribute": object.__setattr__,
    }
    exec("\n".join(lines), names)  # noqa: S102 - the source consists of the names of fields, as in dataclasses
    init = names["__init__"]
    update_wrapper(init, cls.__init__)
    type.__setattr__(cls, "__init__", init)
    return cls
