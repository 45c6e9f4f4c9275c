"""Create files that only their owner can read, and read regular files only.

Content of conversations, tokens and keys is in databases, exports and histories. So each file that Kedge creates is
private, also in a folder where others can plant links: a new file is created with ``O_EXCL``, which never opens one
that exists, nor what a link points to.
"""

import errno
import os
import stat
from typing import BinaryIO

FilePath = str | os.PathLike[str]

MAX_SETTINGS_BYTES = 1_000_000
"""The maximum size of a file with settings, prices or models."""


def create_private_file(path: FilePath) -> BinaryIO:
    """Create a file that only its owner can read, and open it for writing.

    Raises:
        FileExistsError: There is a file or a link with this name, which may be one that another user planted.
        OSError: The file cannot be created.
    """
    return open(path, "xb", opener=_open_privately)


def ensure_private_file(path: FilePath) -> bool:
    """Create an empty file that only its owner can read, unless it exists.

    An existing file is neither changed nor opened: closing it would release every lock of this process on it. If the
    path is a link to a file that does not exist, that file is created.

    Returns:
        Whether the file was created.

    Raises:
        OSError: The file cannot be created.
    """
    try:
        create_private_file(os.path.realpath(path)).close()
    except FileExistsError:
        return False
    return True


def read_regular_file(path: FilePath, max_bytes: int) -> bytes:
    """Return the content of a regular file; a pipe or a device may block or have no end.

    Raises:
        OSError: The file does not exist, cannot be read, is not a regular file, or is too large. ``strerror`` says why.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
    return content


def _open_privately(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; a named pipe without a writer is not waited for, and no terminal becomes that of the process."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
