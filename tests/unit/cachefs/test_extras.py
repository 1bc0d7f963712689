"""A command without its packages says what to install."""

import subprocess
import sys

import pytest

from cachefs.extras import needs_extra


@pytest.mark.parametrize(
    ("module", "missing", "command", "extra"),
    [
        ("cachefs_daemon.cli", "psutil", "cachefsd", "daemon"),
        ("cachefs_daemon.cli", "pydantic", "cachefsd", "daemon"),
        ("cachefs_tools.bench", "psutil", "cachefs-bench", "bench"),
        ("cachefs_tools.demo.command", "psutil", "cachefs-demo", "demo"),
    ],
)
def test_help_names_the_extra(module: str, missing: str, command: str, extra: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from {module} import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = f"{command}: {missing} is not installed; install it with: pip install 'cachefsd[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_what_is_ours_and_missing_is_a_mistake() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("daemon", "cachefsd"):
        import cachefs.no_such_module  # type: ignore[import-not-found]  # noqa: F401
