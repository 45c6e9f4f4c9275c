"""The base class of parts and blocks: frozen Structs of a closed set.

A Struct cannot be changed by an assignment, by ``object.__setattr__`` or by another call of ``__init__``; a
copy of one is the value itself. Decoders, constructors, ``replace`` and pickles all call ``__post_init__``, which
checks the fields and brings them into one form: an encoder omits a field at its default only if it *is* the default,
so equal values have equal JSON only if defaulted texts are interned and all empty maps are one object.
"""

from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec.structs import force_setattr

from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import FrozenMap, check_text, freeze_map

if TYPE_CHECKING:
    Extra = FrozenMap
else:

    class Extra:
        """The type of ``extra`` for decoders, which reject it: the object around it has its members."""


class ImmutableStruct(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    eq=False,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A frozen Struct, copies of which are the value itself."""

    def __init_subclass__(cls) -> None:
        if not cls.__module__.startswith("kedge.turns."):
            raise TypeError(
                f"{cls.__mro__[1].__name__} cannot have subclasses outside of Kedge; use kedge.opaque "
                "for items that Kedge does not know"
            )

    def __ne__(self, other: object) -> bool:  # a Struct does not derive it from __eq__
        return not self == other

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def freeze_extra(value: Any) -> None:
    """Freeze ``extra``, which must not contain fields of the value, because they share one JSON object."""
    extra = freeze_map(value.extra, "extra")
    force_setattr(value, "extra", extra)
    own_fields = {value.__struct_config__.tag_field, *value.__struct_fields__} - {"extra"}
    if used := own_fields & extra.keys():
        raise InvalidTurn(
            f"extra holds {min(used)!r}, which is a field of its own; set that instead"
        )


def check_texts(value: Any, *names: str) -> None:
    """Check text fields, and replace instances of subclasses of ``str``."""
    for name in names:
        text = getattr(value, name)
        if type(text) is not str or not text.isascii():
            force_setattr(value, name, check_text(text, name))
