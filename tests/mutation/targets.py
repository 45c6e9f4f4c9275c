"""The modules that are mutated, and the tests that may fail with their mutants."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A package whose functions decide.

    Attributes:
        package: Its folder in ``src/kedge``, and the folder in ``tests`` that mirrors it.
        excluded: Patterns of modules that only format texts, or are equipment of tests.
        tests: Other folders of tests that use the package.
    """

    package: str
    excluded: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    def list_modules(self, source: Path) -> list[str]:
        """Return the paths of the modules in the package ``kedge``, whose folder is ``source``."""
        paths = sorted((source / self.package).rglob("*.py"))
        modules = [path.relative_to(source).as_posix() for path in paths]
        return [each for each in modules if not self._is_excluded(each)]

    def list_test_folders(self) -> list[str]:
        """Return the folders of tests, from the root of the repository."""
        return [f"tests/{name}" for name in (self.package, *self.tests)]

    def _is_excluded(self, module: str) -> bool:
        return any(fnmatch(module, f"{self.package}/{pattern}") for pattern in self.excluded)


TARGETS = (
    Target("planning", excluded=("explain.py",), tests=("law", "engines")),
    Target("evidence", tests=("law", "engines")),
    Target("chaining", tests=("law",)),
    Target("conversation", tests=("law",)),
    Target("store", excluded=("tree.py",), tests=("conversation",)),
    Target("server", excluded=("faults/*", "uvicorn_server.py"), tests=("testing",)),
    Target(
        "engines", excluded=("sync.py",), tests=("middleware", "providers", "conversation/chat")
    ),
    Target("middleware", excluded=("log.py",), tests=("conversation/chat", "tools")),
)
PROCESS_TESTS = (
    *("tests/conversation/test_crash.py", "tests/server/test_crash.py"),
    *("tests/server/test_replica_kills.py", "tests/store/test_concurrent_processes.py"),
    *("tests/store/test_faults.py", "tests/store/test_outages.py"),
    "tests/store/test_skewed_clocks.py",
)
"""Slow tests of other processes, which are not measured: steps of the campaign run them."""
