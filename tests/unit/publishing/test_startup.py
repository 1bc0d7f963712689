"""What every Python of a run does before its program, in Pythons that this machine does not have."""

import subprocess
import sys

import pytest

from cachefs.run import STARTUP_DIRECTORY

FILE = str(STARTUP_DIRECTORY / "sitecustomize.py")
BEGIN = f"""
import contextlib, importlib.machinery as machinery, sys
__file__, tried, real = {FILE!r}, [], machinery.ExtensionFileLoader.create_module
def create(self, spec):
    if spec.name != "_process":
        return real(self, spec)
    tried.append(spec.name)
    raise SystemError("it is of another Python")
machinery.ExtensionFileLoader.create_module = create
"""
START = """
with contextlib.suppress(ImportError):
    exec(compile(open(__file__).read(), __file__, "exec"))
print(tried, type(sys.meta_path[0]).__name__)
"""


@pytest.mark.parametrize(
    ("code", "tried"), [("", ["_process"]), ("machinery.EXTENSION_SUFFIXES.remove('.abi3.so')", [])]
)
def test_a_module_for_other_pythons_changes_nothing(code: str, tried: list[str]) -> None:
    """A free-threaded Python would crash by it, and any other failure must not keep the job from being watched."""
    command = [sys.executable, "-S", "-c", BEGIN + code + START]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{tried} DataLoaderFinder\n", "")
