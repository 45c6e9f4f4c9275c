"""Fault injection: make the local server misbehave as real servers do.

A fault is written as its name, its value and its options: ``cut_after_events=3``,
``status=429,retry_after=1,times=2``, ``forget_silently,echo=no``. ``KINDS`` lists them all. A fault
applies to requests for a response, at any endpoint; with ``times=k`` it is removed after the k-th
request that it changed. ``middleware`` applies the active faults to requests, ``effects`` are what they change. See
docs/faults.md.
"""

from kedge.server.faults.active import Faults, parse
from kedge.server.faults.effects import KINDS, Fault

__all__ = [
    "KINDS",
    "Fault",
    "Faults",
    "parse",
]
