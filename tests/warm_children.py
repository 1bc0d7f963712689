"""Forks the programs that a warm daemon starts, such as the listing of a dataset, from a process with their modules.

A daemon of tests is forked from a process that has its modules (tests/warm_python.py). `fork_children` forks a child of
that daemon, before the daemon has threads, which then waits. Where the daemon starts `python -m MODULE` with one of
MODULES, the waiting process forks a process instead, which takes 0.02 s of a processor where Python's start takes
0.1 s and the import of an S3 client 0.4 s. The new process is a child of the daemon, as one that the daemon starts
itself: its signals, its exit status and its death with the daemon are the kernel's. It has the arguments, the files,
the environment, the umask, the group and the limit of descriptors that the daemon has at that moment.

What differs is that all modules of the daemon are there before the program begins, and that it does not free its memory
at its end. On machines other than x86-64 the daemon starts its children itself.
"""

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from tests.warm_python_process import end, show, status_of

MODULES = (
    "cachefs_daemon.datasets.listing",
    "cachefs_cluster.sharing.snapshot_check",
    "cachefs_cluster.peers",
    "cachefs_daemon.fetch_process",
)
# The flags with which fork(3) calls clone(2), and the one that makes the new process a sibling of this one.
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
# Of x86-64.
_SYS_CLONE, _SYS_SET_ROBUST_LIST, _SYS_GET_ROBUST_LIST = 56, 273, 274
_PR_GET_TID_ADDRESS = 40
# Descriptors are moved here before they get the numbers that the program knows.
_ASIDE = 500
_MOST_FILES = 16


def fork_children() -> None:
    """Have this process's later children of MODULES forked."""
    if platform.machine() != "x86_64":
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        show(["warm children of a daemon"])
        _serve(theirs)
    theirs.close()
    asking = threading.Lock()
    execute = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_or_execute(command: Sequence[Any], *rest: Any) -> int:
        words = [os.fsdecode(word) for word in command]
        _, _, kept, directory, environment, stdin, _, _, stdout, _, stderr, _, errors, *_ = rest
        if not _is_warm(words) or directory is not None or environment is not None:
            pid: int = execute(command, *rest)
            return pid
        files = {number: number for number in kept if number != errors}
        files |= {number: file for number, file in enumerate((stdin, stdout, stderr)) if file != -1}
        request = {
            "command": words,
            "numbers": [*files],
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "umask": _umask(),
            "group": os.getegid(),
            "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        with asking:
            socket.send_fds(ours, [json.dumps(request).encode()], list(files.values()))
            pid = int(ours.recv(64) or b"0")
        if pid <= 0:  # which os.kill would take for many processes
            raise BlockingIOError(errno.EAGAIN, "no process could be forked")
        return pid

    subprocess._fork_exec = fork_or_execute  # type: ignore[attr-defined]


def _is_warm(words: Sequence[str]) -> bool:
    python, *rest = (word for word in words[:4] if word != "-P")
    return python == sys.executable and rest[0] == "-m" and rest[1] in MODULES if len(rest) > 1 else False


def _umask() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _serve(link: socket.socket) -> None:
    """Fork for each request. Ends with the daemon."""
    while True:
        data, files, _, _ = socket.recv_fds(link, 1 << 20, _MOST_FILES)
        if not data:
            os._exit(0)
        pid = _fork_sibling()
        if not pid:
            _run(json.loads(data), files)
        link.send(b"%d" % pid)
        for file in files:
            os.close(file)


def _fork_sibling() -> int:
    """Fork a process whose parent is this process's parent. This process has one thread.

    As fork(3), it has the C library know the new thread's number, and the kernel the locks that the thread holds.
    """
    library = ctypes.PyDLL(None, use_errno=True)
    number, locks, size = ctypes.c_ulong(), ctypes.c_ulong(), ctypes.c_ulong()
    if library.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(number)) or library.syscall(
        _SYS_GET_ROBUST_LIST, 0, ctypes.byref(locks), ctypes.byref(size)
    ):
        raise OSError(ctypes.get_errno(), "the kernel does not tell where the thread's number and its locks are")
    flags = _CLONE_PARENT | _CLONE_CHILD_CLEARTID | _CLONE_CHILD_SETTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = library.syscall(_SYS_CLONE, ctypes.c_ulong(flags), None, None, number, None)
    if pid == 0:
        library.syscall(_SYS_SET_ROBUST_LIST, locks, size)
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid  # -1 where there may be no more processes


def _run(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the program of the request, to its end."""
    status = 0
    try:
        _take_over(request, files)
        command = request["command"]
        show(command)
        module = command[command.index("-m") + 1]
        sys.orig_argv, sys.argv = command, ["-m", *command[command.index("-m") + 2 :]]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = status_of(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    end(status)


def _take_over(request: dict[str, Any], files: Sequence[int]) -> None:
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for file in files]
    os.closerange(3, _ASIDE)
    for number, file in zip(request["numbers"], aside, strict=True):
        os.dup2(file, number)
    os.closerange(_ASIDE, _ASIDE + _MOST_FILES)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.setegid(request["group"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["limit"])
    os.environ.clear()
    os.environ.update(request["environment"])
