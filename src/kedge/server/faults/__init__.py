"""Fault injection: make the local server misbehave as real servers do.

``spec`` parses fault specifications and has the active ones; ``middleware`` applies them to requests,
``effects`` are what they change. See docs/practice.md.
"""

from kedge.server.faults.spec import KINDS, Fault, Faults, parse

__all__ = ["KINDS", "Fault", "Faults", "parse"]
