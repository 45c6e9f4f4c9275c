"""Helpers without a concept of their own: arguments, text, JSON, event loops, URLs, encryption, limits."""
