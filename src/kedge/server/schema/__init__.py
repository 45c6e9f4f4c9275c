"""Schemas of requests as data.

``validators`` defines validators; the other modules are tables of them: ``content`` parts, ``tools``, ``calls``,
and the ``requests`` of each endpoint with their items.
"""
