"""What the compactors with limits share: checks of their settings, and their words."""

from kedge.errors import InvalidSetting

TOO_LONG = "the newest exchange alone is over the limit; it is kept whole"


def whole_number(name: str, value: int, *, most: int | None = None) -> int:
    """Return a setting that must be a whole number of at least one (and at most ``most``)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"{name} must be a whole number of at least 1, not {value!r}")
    if most is not None and value > most:
        raise InvalidSetting(f"{name} must not be above its maximum: {value} is more than {most}")
    return value
