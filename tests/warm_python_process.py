"""`warm_python_process.py FD MODULE...`: imports modules, and forks a program for each request through the socket FD.

See tests/warm_python.py, which starts it.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import site
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# What PYTHONPATH adds to where Python looks for modules.
NAMED = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
# Where Python looks without it, but for the directory of the script.
SEARCHED = [path for path in sys.path[1:] if path not in NAMED]
# A command before another one: the process is killed when the server ends.
END_WITH_SERVER = ["setpriv", "--pdeathsig=KILL"]
_PR_SET_PDEATHSIG = 1
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Descriptors that a job inherits besides its standard files: see tests/collecting.py.
inherited: list[int] = []
# What /proc shows is read from here.
shown: list[object] = []
# Programs whose processes end without freeing their memory first (`end`).
OURS = ("cachefsd", "mount.cachefs", "cachefs-scheduler")
DATALOADER = "torch.utils.data.dataloader"


@dataclass(frozen=True)
class Request:
    """A job: its command, and its standard files as descriptors."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]


class Executed(BaseException):
    """`cachefs run` becomes this command."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        super().__init__(command)
        self.command, self.environment = [*command], environment


def import_all(modules: Sequence[str]) -> list[tuple[Callable[..., object], Any, Any]]:
    """Import the modules. Returns what they have registered to be run at the end of the process."""
    found: list[tuple[Callable[..., object], Any, Any]] = []
    register = atexit.register

    def keep(function: Any, *arguments: Any, **options: Any) -> Any:
        found.append((function, arguments, options))
        return register(function, *arguments, **options)

    atexit.register = keep  # type: ignore[assignment]
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        atexit.register = register
    gc.collect()
    gc.freeze()  # so that the collector of a child does not touch, and copy, every page
    return found


def serve(link: socket.socket) -> Request:
    """Fork for each request. Returns in the child only; ends when the other end of the link is closed."""
    jobs: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    selector.unregister(key.fd)
                    tell_end(key.fd, *jobs.pop(key.fd))
                    continue
                request = received(link)
                if request is None:
                    atexit._run_exitfuncs()
                    os._exit(0)
                *files, status = request.files
                pid = os.fork()
                if not pid:
                    return request
                told = socket.socket(fileno=status)
                with contextlib.suppress(OSError):
                    told.send(b"%d" % pid)
                for file in files:
                    os.close(file)
                pidfd = os.pidfd_open(pid)
                jobs[pidfd] = pid, told
                selector.register(pidfd, selectors.EVENT_READ)


def received(link: socket.socket) -> Request | None:
    data, files, _, _ = socket.recv_fds(link, 1 << 20, 4)
    return Request(**json.loads(data), files=files) if data else None


def tell_end(pidfd: int, pid: int, told: socket.socket) -> None:
    os.close(pidfd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with told, contextlib.suppress(OSError):
        told.send(b"%d" % status)


def end_at_once() -> None:
    """Have the process end once Python has ended: the destructors of torch's C++ globals take 0.14 s of a processor.

    Called after the fork, since libc runs first what was registered last.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the exit status


def take_over(request: Request) -> None:
    """Have the files, the directory and the environment of the job, and no descriptor besides but `inherited`."""
    # The new descriptors have numbers above those that they replace.
    for number, file in enumerate(request.files[:3]):
        os.dup2(file, number)
    first = 3
    for kept in [*sorted(inherited), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, kept)
        first = kept + 1
    os.chdir(request.directory)
    replace_environment(request.environment)


def show(command: Sequence[str]) -> None:
    """Have /proc show the command and the environment, as of a process that was started with them."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third one, see proc(5)
    code, data, brk, stack = fields[23:25], fields[42:44], fields[44], fields[25]
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    ends: list[int] = []
    for words in command, variables:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        shown.append(ctypes.create_string_buffer(text, len(text)))
        address = ctypes.addressof(shown[-1])
        ends += address, address + len(text)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    # struct prctl_mm_map, without an auxiliary vector and with the program as it is.
    numbers = [*map(int, code), *map(int, data), int(brk), libc.sbrk(0), int(stack), *ends, 0]
    layout = struct.pack("=12QIi", *numbers, 0, -1)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0):
        raise OSError(ctypes.get_errno(), "the kernel does not take the command to show")


def replace_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def command_of(command: list[str]) -> list[str]:
    """The Python command, after each command before it has changed the process as it does."""
    while True:
        if os.path.basename(command[0]) == "cachefs":
            command = executed(command)
        elif command[:2] == END_WITH_SERVER:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            command = command[2:]
        else:
            break
    assert os.path.samefile(command[0], sys.executable), f"{command[0]} is another program"
    return command


def executed(command: list[str]) -> list[str]:
    """Run cachefs as its script does, up to the call that makes the process another program."""

    def execute(_: str, words: Sequence[str], environment: dict[str, str]) -> NoReturn:
        raise Executed(words, environment)

    before = os.execvpe
    os.execvpe = execute  # type: ignore[assignment]
    sys.argv = command
    try:
        from cachefs.cli import main

        main()
        raise AssertionError("the command has returned")
    except Executed as became:
        replace_environment(became.environment)
        return became.command
    finally:
        os.execvpe = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "cachefs"]:
            del sys.modules[name]


def prepare(command: list[str]) -> None:
    """Set arguments and paths as Python does at its start, and run the sitecustomize of the job."""
    options = command[1:]
    assert options[0] == "-c" or not options[0].startswith("-"), f"options of Python are refused: {options}"
    added = os.environ.get("PYTHONPATH")
    named = [os.path.abspath(path) for path in added.split(os.pathsep)] if added else []
    show(command)
    sys.orig_argv = command
    sys.argv = options if options[0] != "-c" else ["-c", *options[2:]]
    sys.path[:] = dict.fromkeys([*named, *SEARCHED])
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    watch_dataloader()
    sys.path.insert(0, "" if options[0] == "-c" else os.path.dirname(os.path.abspath(options[0])))


def watch_dataloader() -> None:
    """Have the hooks watch torch's DataLoader, as they would when it is imported."""
    for finder in sys.meta_path:
        if type(finder).__name__ == "DataLoaderFinder":
            sys.meta_path.remove(finder)
            hooks: dict[str, Any] = finder.find_spec.__func__.__globals__  # type: ignore[attr-defined]
            hooks["watch_dataloader"](sys.modules[DATALOADER])
            return


def run_main(options: list[str]) -> int:
    """Run the job as the module __main__. Returns the exit status."""
    module: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        if options[0] == "-c":
            exec(compile(options[1], "<string>", "exec"), module.__dict__)
        else:
            module.__file__ = options[0]
            module.__cached__ = None
            with open(options[0], "rb") as file:
                code = compile(file.read(), options[0], "exec")
            exec(code, module.__dict__)
    except SystemExit as error:
        return status_of(error)
    except BaseException as error:
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *_: None
            raise  # Python then ends by the signal
        return 1
    return 0


def end(status: int) -> NoReturn:
    """End as Python does, but leave it to the kernel to free the memory, which takes a mount 0.05 s of a processor."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # for modules of `tests`, which is nowhere installed
    registered = import_all(sys.argv[2:])
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    end_at_once()
    take_over(job)
    # A job's own process would register first what its sitecustomize wants in the end, and run that last.
    for function, _, _ in registered:
        atexit.unregister(function)
    to_run = command_of(job.command)
    prepare(to_run)
    for function, arguments, keywords in registered:
        atexit.register(function, *arguments, **keywords)
    program = os.path.basename(to_run[1])
    if program == "cachefsd":
        from tests.warm_children import fork_children

        fork_children()
    ended = run_main(to_run[1:])
    if program in OURS:
        end(ended)
    sys.exit(ended)
