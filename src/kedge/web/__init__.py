"""The page, and the JSON API behind it: what the server remembers, what was sent, and why."""
