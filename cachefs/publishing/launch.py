"""Runs a module of cachefs in a process beside the job: `python -I -S launch.py helper|why ARGUMENT...` (see `main` of
cachefs.publishing.helper and of cachefs.publishing.read_failure).

This file is a script, never imported. The interpreter is isolated (-I): the job's PYTHONPATH may have packages for
another Python, or the hooks of `cachefs run`. cachefs is therefore found by its path, and all other packages in the
interpreter's own directories.

The arguments of the helper are DIRECTORY OWNER ALIVE LISTENER PAGE JOB STDERR READY. The helper is no child of the
training process, so that a training process that waits for its children never meets it: where READY is `child`, this
process is a child and forks the helper. Otherwise READY is a descriptor to which this process writes a byte once Python
has started.
"""

import importlib.util
import os
import site
import sys


def find_cachefs() -> None:
    """Make `import cachefs` mean the package that this file belongs to."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "cachefs", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["cachefs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def find_packages() -> None:
    """Make `import` find all other packages, which -S has left out."""
    site.main()
    if sys.prefix == sys.base_prefix and os.path.isdir(site.getusersitepackages()):
        site.addsitedir(site.getusersitepackages())  # last: of a `pip install --user`


def run_helper(directory: str, owner: str, *more: str) -> None:
    """Become the helper, or fork it and exit."""
    alive, listener, page, job, stderr, ready = more
    child = os.fork() if ready == "child" else 0
    if child or ready != "child":
        # A path to the page, for spawned workers.
        os.symlink(f"/proc/{child or os.getpid()}/fd/{page}", os.path.join(directory, "page"))
    if child:
        os._exit(0)
    if ready != "child":
        os.write(int(ready), b"1")  # a process that the job has just forked may have the other end open too
        os.close(int(ready))
    # The working directory must not keep a file system from being unmounted.
    os.chdir("/")
    find_cachefs()
    from cachefs.publishing.page import SharedPage

    try:
        find_packages()  # only now, so that the training process waits no longer than necessary
        from cachefs.publishing.helper import main

        main(directory, int(owner), (int(alive), int(listener), int(page)), job, stderr)
    except BaseException as error:  # this process only runs the helper, and ends with it
        SharedPage(int(page)).append_log(f"publishing has failed ({error!r}); the job continues without it")
        raise
    os._exit(0)  # Python would free all memory first, which takes 0.03 s of a processor beside the next job


def run_read_failure(number: str, job: str, output: str) -> None:
    """Become the process that reports why a read has failed."""
    find_cachefs()
    find_packages()
    from cachefs.publishing.read_failure import main

    main(number, job, output)


if __name__ == "__main__":
    run = run_helper if sys.argv[1] == "helper" else run_read_failure
    run(*sys.argv[2:])
