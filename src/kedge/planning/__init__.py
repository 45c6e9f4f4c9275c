"""Digests, anchors and the plan: what to send, and why."""
