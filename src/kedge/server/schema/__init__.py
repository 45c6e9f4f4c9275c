"""Schemas of requests as data.

``validators`` defines validators; the other modules are tables of them: ``content`` parts, ``tools``, ``calls``,
the ``items`` of a conversation and the ``requests`` of each endpoint.
"""
