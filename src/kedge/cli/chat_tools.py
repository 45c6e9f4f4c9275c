"""The tools that ``kedge chat`` offers when it is given none: small, real and harmless."""

from datetime import UTC, date, datetime
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kedge.errors import ToolFailed


def clock(zone: Annotated[str, "An IANA time zone such as Europe/Paris"] = "UTC") -> str:
    """Tell the date and time in a time zone."""
    try:
        place = UTC if zone.upper() == "UTC" else ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        raise ToolFailed(f"no time zone named {zone!r}; write one such as Europe/Paris") from None
    return datetime.now(place).isoformat(timespec="seconds")


def days_between(first: date, second: date) -> int:
    """Count the days from the first date to the second."""
    return (second - first).days


ALL = (clock, days_between)
