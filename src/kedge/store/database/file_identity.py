"""Detect that the files of an open SQLite database were removed or replaced.

The operating system keeps a removed file for a process that has it open. So this process would go on without an error:
what it writes is lost when it ends, and what others write into the file that is there now, such as the revocation of a
token, is not seen. The same is true of the journal (``-wal``) and its index (``-shm``).
"""

import os

from kedge.errors import StoreReplaced

Identity = tuple[int, int]
"""The numbers of a device and of a file on it; no other file has them while this one is open."""

JOURNAL_SUFFIXES = ("-wal", "-shm")


class OpenFiles:
    """The files of an open database, with the identities that they had when they were opened.

    Args:
        path: The database file; empty for a database in memory, which has no files.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # SQLite writes the journal beside the file, not beside a link to it.
        self._journal = tuple(os.path.realpath(path) + suffix for suffix in JOURNAL_SUFFIXES)
        self._identities: dict[str, Identity] = {}

    def record(self, *, has_journal: bool) -> None:
        """Record the identities of files that a connection has just opened, and that were not open before."""
        if not self._path:
            return
        identities = dict(self._identities)
        files = [self._path]
        if has_journal:
            files += self._journal
        for file in files:
            identity = _identify(file)
            if identity is not None:
                identities.setdefault(file, identity)
        self._identities = identities  # in one step: other threads may be checking

    def forget_journal(self) -> None:
        """Forget the identity of the journal, because the last connection was closed, which deletes it."""
        self._identities = {
            file: identity for file, identity in self._identities.items() if file == self._path
        }

    def check(self) -> None:
        """Compare the files with those that were opened.

        Raises:
            StoreReplaced: One of them was removed or replaced.
        """
        for file, identity in self._identities.items():
            if _identify(file) == identity:
                continue
            kind = "its file" if file == self._path else "its journal"
            raise StoreReplaced(
                f"{kind} was removed or replaced while it was open; nothing is read or written until the store is "
                "opened again: restart what uses it",
                self._path,
            )


def _identify(file: str) -> Identity | None:
    try:
        status = os.stat(file)  # noqa: PTH116 - Path.stat takes twice as long
    except OSError:
        return None
    return status.st_dev, status.st_ino
