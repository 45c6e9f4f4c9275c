"""Tests of the check whether the files of an open database are those that were opened."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from for_each import for_each
from kedge.errors import StoreReplaced
from kedge.store.database.file_identity import OpenFiles


def make_files(folder: Path) -> Path:
    """Create a database with a journal, and return its path."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"x.db{suffix}").write_text("content")
    return folder / "x.db"


def replace_file(path: Path) -> None:
    """Replace a file by a copy, as an editor or a backup does."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


@for_each("change", [Path.unlink, replace_file])
@for_each("suffix", ["", "-wal", "-shm"])
def test_a_file_that_was_removed_or_replaced_is_detected(
    tmp_path: Path, suffix: str, change: Callable[[Path], None]
) -> None:
    """Each of the files is compared; the error names what was changed, and the path apart from the problem."""
    folder = tmp_path / f"{suffix}{change.__name__}"
    folder.mkdir()
    path = make_files(folder)
    files = OpenFiles(str(path))
    files.record(has_journal=True)
    files.check()
    change(folder / f"x.db{suffix}")
    kind = "journal" if suffix else "file"
    with pytest.raises(StoreReplaced, match=f"its {kind} was removed or replaced") as exc_info:
        files.check()
    assert exc_info.value.location == str(path)
    assert str(folder) not in exc_info.value.problem


def test_what_was_not_open_may_appear(tmp_path: Path) -> None:
    """A journal may be created and deleted while no connection uses it, and a database in memory has no files."""
    path = tmp_path / "x.db"
    path.write_text("content")
    files = OpenFiles(str(path))
    files.record(has_journal=True)
    make_files(tmp_path)
    files.check()
    files.record(has_journal=True)
    files.forget_journal()
    (tmp_path / "x.db-wal").unlink()
    files.check()
    path.unlink()
    with pytest.raises(StoreReplaced):
        files.check()
    memory = OpenFiles("")
    memory.record(has_journal=True)
    memory.check()


def test_the_file_behind_a_link_is_compared(tmp_path: Path) -> None:
    """A link that points to another file now is detected, and the journal is expected beside the file."""
    folder = tmp_path / "disk"
    folder.mkdir()
    path = make_files(folder)
    link = tmp_path / "link.db"
    link.symlink_to(path)
    files = OpenFiles(str(link))
    files.record(has_journal=True)
    files.check()
    os.replace(folder / "x.db-wal", folder / "moved")  # noqa: PTH105
    with pytest.raises(StoreReplaced, match="journal"):
        files.check()
    os.replace(folder / "moved", folder / "x.db-wal")  # noqa: PTH105
    files.check()
    link.unlink()
    link.symlink_to(folder / "x.db-shm")
    with pytest.raises(StoreReplaced, match="its file"):
        files.check()
