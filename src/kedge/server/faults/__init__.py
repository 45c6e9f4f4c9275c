"""Faults on purpose: everything that servers in the wild do wrong, for tests to meet it.

``language`` says what faults there are and which are armed; ``injection`` is the middleware that
lets them strike. Read the page on faults in the documentation first.
"""

from kedge.server.faults.spec import KINDS, Fault, Faults, parse

__all__ = ["KINDS", "Fault", "Faults", "parse"]
