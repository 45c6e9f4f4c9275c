"""Kedge: conversations with language models that remember.

The Turn is the truth; a stored response is only a cache of a prefix of it.
"""
