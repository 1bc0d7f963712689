"""A command without its packages says what to install, in words that work as they stand."""

import json
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from cachefs.extras import install_command, require_extra


@pytest.mark.parametrize(
    ("module", "missing", "command", "extra"),
    [
        ("cachefsd.command", "psutil", "cachefsd", "daemon"),
        ("cachefsd.command", "pydantic", "cachefsd", "daemon"),
    ],
)
def test_help_names_the_extra(module: str, missing: str, command: str, extra: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from {module} import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = f"{command}: {missing} is not installed; install it with: {install_command(extra)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        ({"url": "file://{here}/a%20clone", "dir_info": {}}, "{python} -m pip install '{here}/a clone[mount]'"),
        (
            {"url": "file://{here}/clone", "dir_info": {"editable": True}},
            "{python} -m pip install -e '{here}/clone[mount]'",
        ),
        ({"url": "file://{here}/gone", "dir_info": {}}, "pip install '.[mount]' in a clone of cachefs"),
        ({"url": "https://packages.example/x.whl"}, "pip install '.[mount]' in a clone of cachefs"),
        (None, "pip install '.[mount]' in a clone of cachefs"),
        (["nonsense"], "pip install '.[mount]' in a clone of cachefs"),
    ],
    ids=["directory", "editable", "directory that is gone", "from the network", "Debian package", "nonsense"],
)
def test_an_extra_is_installed_from_where_cachefs_was(noted: object, said: str, tmp_path: Path) -> None:
    for name in ("a clone", "clone", "info"):
        (tmp_path / name).mkdir()
    if noted is not None:
        (tmp_path / "info/direct_url.json").write_text(json.dumps(noted).replace("{here}", str(tmp_path)))
    found = install_command("mount", PathDistribution(tmp_path / "info"))
    assert found.startswith(said.format(here=tmp_path, python=sys.executable))


def test_what_is_ours_and_missing_is_a_mistake() -> None:
    with pytest.raises(ModuleNotFoundError), require_extra("daemon", "cachefsd"):
        import cachefs.no_such_module  # type: ignore[import-not-found]  # noqa: F401
