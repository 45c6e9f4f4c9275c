"""The options of a request."""

from typing import get_type_hints

from kedge.engines import Request, RequestOptions
from kedge.engines.request_options import OPTION_NAMES, BodyParams

CONVERTED = {"tools", "ephemeral"}
"""Options that a caller may write in several forms, of which a request has one."""
INTERNAL = {"params", "probe", "filters", "applied", "output"}
"""The members of a request that are not options; ``output`` is a parameter of its own."""


def test_a_request_has_the_options_of_its_callers() -> None:
    """Both statements of the options have the same names and types, and each option has a default."""
    options, members = get_type_hints(RequestOptions), get_type_hints(Request)
    assert set(members) == OPTION_NAMES | INTERNAL
    assert set(options) == OPTION_NAMES | set(BodyParams.__optional_keys__) | {"extra_body"}
    for name in OPTION_NAMES - CONVERTED:
        assert options[name] == members[name], name
    assert len(Request.__struct_defaults__) == len(Request.__struct_fields__)
