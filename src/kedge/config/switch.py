"""The rollback switch: one variable of the environment that turns chaining off everywhere at once."""

import os

SWITCH = "ENABLE_RESPONSE_BOUNDARY_TRACKING"
_OFF = frozenset({"0", "false", "off", "no"})


def chaining_enabled() -> bool:
    """Whether chaining is allowed; it is, unless the environment says no."""
    return os.environ.get(SWITCH, "1").strip().lower() not in _OFF
