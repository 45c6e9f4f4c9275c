"""The command line: one module per command or group of related commands, imported on first use."""

from kedge.cli.commands import group, main

__all__ = [
    "group",
    "main",
]
