"""Python processes that are forks of one process, which has imported Kedge.

A new interpreter needs a second to import Kedge and to load the vocabulary; a fork needs a tenth of that.
It is a process like another, with its own environment, folder, streams, signals and exit code. Only what is decided
when an interpreter starts (its options and variables, and which modules are imported) needs ``subprocess``.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import anyio

MODULES = (
    *("kedge", "kedge.cli.auth", "kedge.cli.batch", "kedge.cli.chat", "kedge.cli.chat_output"),
    *("kedge.cli.chat_session", "kedge.cli.serve", "kedge.conversation.sync", "kedge.engines.sync"),
    *("kedge.engines.http_client", "kedge.usage.prices", "kedge.providers.practice_memory"),
    *(
        "kedge.chaining.proxy",
        "kedge.server.app",
        "kedge.server.settings",
        "kedge.server.uvicorn_server",
    ),
    *("kedge.web", "kedge.workflows", "prompt_toolkit", "pydantic", "websockets"),
    "anyio._backends._asyncio",
)
"""What the processes of the tests import."""
NUMBER = struct.Struct("q")


class ForkedProcess(subprocess.Popen[Any]):
    """A process of Python. Its arguments are those of the interpreter: ``-m``, ``-c`` or a file, and so on."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        """Send the streams and what to run to the process that forks, and receive the id of the new one."""
        _, _, _, _, cwd, env, _, _, _, *pipes = others[:15]
        theirs = (pipes[0], pipes[3], pipes[5])
        streams = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
        request = {
            "arguments": list(map(os.fspath, args)),
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
        }
        self._link = _get_fork_server().send(request, streams)
        (self.pid,) = NUMBER.unpack(self._link.recv(NUMBER.size, socket.MSG_WAITALL))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return the id and the status of the process like ``os.waitpid``, which only its parent can call."""
        if wait_flags & os.WNOHANG and not select.select([self._link], [], [], 0)[0]:
            return 0, 0
        with self._link:
            (status,) = NUMBER.unpack(self._link.recv(NUMBER.size, socket.MSG_WAITALL))
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """Return the exit code, if the process has ended."""
        lock: threading.Lock = self._waitpid_lock  # pyright: ignore[reportAttributeAccessIssue]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                lock.release()
        return self.returncode


def run_forked(
    *arguments: str,
    text: str | bytes | None = None,
    check: bool = False,
    timeout: float | None = 300.0,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a process, with this text as its input, and return what it wrote: a text, if the input is none or one."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    is_text = not isinstance(text, bytes)
    with ForkedProcess(list(arguments), **{**streams, "text": is_text, **options}) as process:
        try:
            output, errors = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        assert done.returncode == 0, done.stderr
    return done


async def run_forked_async(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process, and other tasks until it ends."""
    return await anyio.to_thread.run_sync(functools.partial(run_forked, *arguments, **options))


class _ForkServer:
    """The process that forks, which ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=null, stdout=null, pass_fds=[theirs.fileno()]
            )

    def send(self, request: object, streams: list[int]) -> socket.socket:
        """Request a process; return the socket that receives its id, and its status after its end."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [b"."], [*streams, theirs.fileno()])
        ours.sendall(json.dumps(request).encode() + b"\n")
        return ours

    def stop(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(300)


@functools.cache
def _get_fork_server() -> _ForkServer:
    server = _ForkServer()
    atexit.register(server.stop)
    return server


def main(control: socket.socket) -> None:
    """Fork for each request, and run what it names in the new process."""
    for name in MODULES:
        importlib.import_module(name)
    from kedge.usage.tokens import get_encoding

    get_encoding()
    gc.freeze()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for pytest, which then ends this process
    while fds := socket.recv_fds(control, 1, 4)[1]:
        if not os.fork():
            control.close()
            _run_and_report(fds)
        for fd in fds:
            os.close(fd)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _run_and_report(fds: list[int]) -> NoReturn:
    """Run the request in a child, and report its id and its status."""
    *streams, fd = fds
    link = socket.socket(fileno=fd)
    pid = os.fork()
    if not pid:
        with link, link.makefile("rb") as received:
            request = json.loads(received.readline())
        _replace_streams(streams)
        try:
            _run(request)
        except SystemExit as end:
            _end(end.code)
        _end(0)
    for each in streams:
        os.close(each)
    with suppress(BrokenPipeError):
        link.sendall(NUMBER.pack(pid))
        link.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _end(code: object) -> NoReturn:
    """Do what the interpreter does at its end, except for freeing the memory, which would take most of the time."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code or 0)


def _replace_streams(streams: list[int]) -> None:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    names = ("stdin", "stdout", "stderr")
    for number, (name, mode) in enumerate(zip(names, "rww", strict=True)):
        old = getattr(sys, name)
        buffering = 1 if number == 2 or (number == 1 and os.isatty(1)) else -1
        new = open(number, mode, buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _run(request: dict[str, Any]) -> None:
    """Do what the interpreter does with its arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match request["arguments"]:
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            exec(code, {"__name__": "__main__"})  # noqa: S102 - a program of a test
        case [path, *rest]:
            sys.argv, sys.path[0] = [path, *rest], str(Path(path).parent)
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
