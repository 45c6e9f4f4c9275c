"""What a request may look like, as data: a small schema language and the tables written in it.

Read ``language`` first, then from the leaves up: ``parts`` of content, ``tools`` that a request
offers, ``calls`` that a client answers, ``hosted`` calls, ``items`` of a conversation and the
``parameters`` of each endpoint.
"""
