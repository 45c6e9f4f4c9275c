"""Tests of the creation of private files and the reading of regular ones."""

import os
from pathlib import Path

import pytest

from kedge._internal.files import create_private_file, ensure_private_file, read_regular_file


def read_mode(path: Path) -> int:
    """Return the permissions of a file."""
    return path.stat().st_mode & 0o777


def test_a_created_file_is_private_and_new(tmp_path: Path) -> None:
    """Only the owner can read a created file; what exists, also as a dangling link, is not opened."""
    path = tmp_path / "new"
    with create_private_file(path) as file:
        file.write(b"secret")
    assert (path.read_bytes(), read_mode(path)) == (b"secret", 0o600)
    planted = tmp_path / "planted"
    planted.symlink_to("victim")
    for existing in (path, planted):
        with pytest.raises(FileExistsError):
            create_private_file(existing)
    assert not (tmp_path / "victim").exists()


def test_the_file_behind_a_dangling_link_is_private(tmp_path: Path) -> None:
    """A link of the user to a file that does not exist yet is followed; an existing file keeps its content and mode."""
    link = tmp_path / "link"
    link.symlink_to("target")
    assert ensure_private_file(link)
    target = tmp_path / "target"
    assert read_mode(target) == 0o600
    target.write_bytes(b"content")
    target.chmod(0o640)
    assert not ensure_private_file(link)
    assert (target.read_bytes(), read_mode(target)) == (b"content", 0o640)


def test_only_a_regular_file_of_limited_size_is_read(tmp_path: Path) -> None:
    """A pipe without a writer, a device without an end, a folder and a large file are errors that say why."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large"
    large.write_bytes(b"12345")
    assert read_regular_file(large, 5) == b"12345"
    reasons = {
        pipe: "it is not a regular file",
        Path("/dev/zero"): "it is not a regular file",
        tmp_path: "Is a directory",
        large: "it has more than 4 bytes",
        tmp_path / "missing": "No such file or directory",
    }
    for path, reason in reasons.items():
        with pytest.raises(OSError, match=reason) as exc_info:
            read_regular_file(path, 4)
        assert exc_info.value.strerror == reason
