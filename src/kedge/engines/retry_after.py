"""Read how long a server asks to wait before a retry."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from math import isfinite


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait: a server may send milliseconds, seconds or a date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except (TypeError, ValueError):
            continue
        if isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return max(date.timestamp() - time.time(), 0.0)
