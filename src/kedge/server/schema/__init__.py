"""Schemas of requests as data.

``validators`` defines validators; the other modules are tables of them: ``content`` parts, ``tools``, ``calls``,
and the ``requests`` of each endpoint with their items. In a table of members ``!`` after a name means that the member
is required, ``?`` that it may be null, and a table in place of a validator is an object with these members.
"""
