"""Blocks and Turns: pure, immutable values."""
