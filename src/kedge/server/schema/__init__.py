"""Schemas of requests as data.

``base``, ``scalars`` and ``containers`` define validators; the other modules are tables of them:
``content`` parts, ``tools``, ``client_calls``, ``hosted_calls``, the ``items`` of a conversation and the
``requests`` of each endpoint.
"""
