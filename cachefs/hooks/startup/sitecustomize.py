"""Runs in every Python that `cachefs run` starts, before its program (see cachefs.hooks). Standard library only.

Must run in Pythons of all versions, so it is written as for Python 2.7; before Python 3.11 it does nothing.
"""
# mypy: allow-untyped-defs, allow-untyped-calls

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
DATALOADER = "torch.utils.data.dataloader"
# Last parts of the directory of this file in each installation of cachefs.
ENDING = ["cachefs", "hooks", "startup"]
# Suffix of a module for several versions of Python, in those that can load it.
ABI = ".abi3.so"
# Attribute of `sys`: the directory of the installation that watches this process.
MARK = "_cachefs_hooks"
# Attribute of `sys`: device and inode of the standard error, as in cachefs.publishing.stderr.
STDERR = "_cachefs_stderr"
# Variables with the directory of the run, and with its first Python process, as in cachefs.publishing.run_record.
RUN_VARIABLE = "CACHEFS_RUN"
TOP_VARIABLE = "CACHEFS_TOP"


class DataLoaderFinder:
    """Finds torch's DataLoader as the other finders would, and watches it once it is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != DATALOADER:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            load = spec.loader.exec_module

            def load_and_watch(module):
                load(module)
                watch_dataloader(module)

            spec.loader.exec_module = load_and_watch  # type: ignore[method-assign]
        return spec


def watch_dataloader(dataloader):
    try:
        find_cachefs()
        from cachefs.hooks import loader

        loader.install(dataloader)
    except Exception as error:  # this torch may lack anything
        if is_from_job(error):
            raise
        text = "cachefs: cannot watch torch's DataLoader ({!r}); the job continues unpublished\n"
        print_line(text.format(error))


def print_line(line):
    try:
        from cachefs.publishing import stderr
    except ImportError:
        sys.stderr.write(line)
    else:
        stderr.write_line(line)


def is_from_job(error):
    """Return whether the job raised the exception, such as by its own signal handler."""
    try:
        from cachefs.publishing import job_exceptions
    except ImportError:
        return False
    return job_exceptions.is_from_job(error)


def find_cachefs():
    """Make `import cachefs` mean the package that this file belongs to, also where it is not installed.

    The helper process runs the same package, so that both understand each other's messages.
    """
    if "cachefs" in sys.modules:
        return
    import importlib.util

    package = os.path.dirname(os.path.dirname(HERE))
    spec = importlib.util.spec_from_file_location(
        "cachefs", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(package + " is not a package")
    module = sys.modules["cachefs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def register_summary():
    """Print the summary when this process ends, if it is the first Python of its run."""
    # The process with this number may have become another program by exec, such as a `cachefs run` inside the run.
    if RUN_VARIABLE in os.environ and os.environ.get(TOP_VARIABLE) in (None, str(os.getpid())):
        import atexit

        top = os.environ[TOP_VARIABLE] = str(os.getpid())
        atexit.register(print_summary, top)


def print_summary(top):
    """Print the summary. Runs after all other exit handlers, and not in a forked child."""
    directory = os.environ.get(RUN_VARIABLE, "")
    if top != str(os.getpid()) or not os.path.isdir(directory):
        return
    try:
        if "cachefs.hooks.loader" not in sys.modules and not any(n.endswith(".json") for n in os.listdir(directory)):
            if os.path.basename(directory).split("-")[1:2] == [top]:
                os.rmdir(directory)
            return
        find_cachefs()
        from cachefs.publishing import exit_summary

        exit_summary.print_summary(top)
    except (Exception, KeyboardInterrupt):
        pass  # no code of the job is left to handle it: Python would only print it
    finally:
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            end_as_interrupted()


def print_cause(pid):
    """Print why the read failed that ends this program. Does not run in a forked child."""
    error = getattr(sys, "last_value", None)
    if pid != os.getpid() or not isinstance(error, Exception):  # KeyboardInterrupt is none: see end_as_interrupted
        return
    try:
        find_cachefs()
        from cachefs.publishing import exit_summary

        exit_summary.print_cause(error)
    except (Exception, KeyboardInterrupt):
        pass


def end_as_interrupted():
    """End by SIGINT, as Python does where the source text that it ran last was interrupted. Other texts have run since
    then, as making a dataclass runs one."""
    try:  # noqa: SIM105  # see above
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        pass


def record_stderr():
    """Record the identity of stderr: later lines go there only while it is the same file."""
    try:
        found = os.fstat(2)
    except OSError:
        return
    setattr(sys, STDERR, (found.st_dev, found.st_ino))


def spare_isatty():
    """Avoid the isatty() of Python's open() before 3.14, which would ask the mount for each file
    (cachefs/_process.c)."""
    path = os.path.join(os.path.dirname(os.path.dirname(HERE)), "_process" + ABI)
    if sys.version_info >= (3, 14) or not os.path.exists(path):
        return
    from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    # A free-threaded Python has another object layout, and would crash.
    if ABI not in EXTENSION_SUFFIXES:
        return
    try:
        loader = ExtensionFileLoader("_process", path)
        spec = spec_from_file_location("_process", path, loader=loader)
        module = module_from_spec(spec)  # type: ignore[arg-type]
        loader.exec_module(module)
        module.spare_isatty()
    except Exception:  # no code of the job runs yet; the module may be for another kind of machine
        return


def is_ours(path):
    """Return whether it is the directory of this file in any installation."""
    return os.path.abspath(path).split(os.sep)[-len(ENDING) :] == ENDING


def run_other_sitecustomize():
    """Run the sitecustomize that Python would have found without this one; where there is none, raise ImportError."""
    others = [path for path in sys.path if not is_ours(path)]
    if sys.version_info < (3, 4):  # noqa: UP036  # see above
        import imp

        file, path, description = imp.find_module("sitecustomize", others)
        sys.modules["sitecustomize"] = imp.load_module("sitecustomize", file, path, description)
        return
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(module)


if sys.version_info >= (3, 11) and not hasattr(sys, MARK):
    setattr(sys, MARK, HERE)
    record_stderr()
    spare_isatty()
    sys.meta_path.insert(0, DataLoaderFinder())
    register_summary()
    import atexit

    atexit.register(print_cause, os.getpid())
run_other_sitecustomize()
