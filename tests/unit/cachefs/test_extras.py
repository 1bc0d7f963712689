"""A command without its packages says what to install."""

import subprocess
import sys

import pytest

from cachefs.extras import needs_extra


@pytest.mark.parametrize(
    ("module", "missing", "said"),
    [
        ("cachefs_daemon.cli", "psutil", "cachefsd: psutil is not installed; install it with: pip install 'cachefs[daemon]'"),
        ("cachefs_daemon.cli", "pydantic", "cachefsd: pydantic is not installed; install it with: pip install 'cachefs[daemon]'"),
        ("cachefs_tools.bench", "psutil", "cachefs-bench: psutil is not installed; install it with: pip install 'cachefs[bench]'"),
        ("cachefs_tools.demo", "psutil", "cachefs-demo: psutil is not installed; install it with: pip install 'cachefs[demo]'"),
    ],
)  # fmt: skip
def test_help_names_the_extra(module: str, missing: str, said: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['x', '--help']; from {module} import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


def test_what_is_ours_and_missing_is_a_mistake() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("daemon", "cachefsd"):
        import cachefs.no_such_module  # type: ignore[import-not-found]  # noqa: F401
