"""Tests of the list of targets: what it names exists."""

from pathlib import Path

from for_each import for_each
from mutation.targets import PROCESS_TESTS, TARGETS, Target

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kedge"


@for_each("target", TARGETS)
def test_every_target_exists(target: Target) -> None:
    """A target has modules and folders of tests, and each of its exceptions leaves out a module."""
    assert target.list_modules(SOURCE)
    assert [folder for folder in target.list_test_folders() if not (ROOT / folder).is_dir()] == []
    assert [name for name in target.excluded if not [*(SOURCE / target.package).glob(name)]] == []


def test_every_test_that_is_left_out_exists() -> None:
    """The tests of other processes are files."""
    assert [path for path in PROCESS_TESTS if not (ROOT / path).is_file()] == []
