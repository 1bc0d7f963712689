"""The package installs where it must: without a compiler in a training environment, and as the Dockerfile says."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")

# What the image needs not to carry, and these tests need not to wait for: no downloads twice, and no byte code.
QUICK = {"PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}


SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg")
COMMANDS = [line.partition(" = ")[0] for line in SETUP["options.entry_points"]["console_scripts"].split("\n") if line]
# Commands that can say nothing without an extra but that it is missing.
EXTRAS = {
    "cachefsd": "daemon",
    "cachefs-scheduler": "scheduler",
    "cachefs-slurm-hint": "scheduler",
}


class Step(NamedTuple):
    instruction: str
    arguments: str


def dockerfile() -> list[Step]:
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in lines if line.strip()]


def copy_context(destination: Path) -> None:
    """Copy what the Dockerfile's first stage copies, as it copies it."""
    for step in dockerfile():
        if step.instruction == "COPY" and not step.arguments.startswith("--from"):
            *sources, target = step.arguments.split()
            for source in sources:
                if (REPOSITORY / source).is_dir():
                    shutil.copytree(REPOSITORY / source, destination / target, ignore=NOT_SOURCE)
                else:
                    shutil.copy(REPOSITORY / source, destination / target)


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


def helped(command: Path, env: Mapping[str, str]) -> str:
    """Which extra `--help` asks for in one line; empty where it is the help."""
    done = subprocess.run([command, "--help"], env=env, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        assert done.stdout.startswith("Usage: ")
        return ""
    asked = re.fullmatch(
        rf"{command.name}: \w+ is not installed; install it with: \S+ -m pip install '\S+\[(\w+)\]'\n", done.stderr
    )
    assert asked, done.stderr
    return asked[1]


@pytest.mark.packaging
def test_base_package_installs_without_compiler_and_libfuse(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copy_context(source)
    environment = tmp_path / "environment"
    binaries = environment / "bin"
    venv.create(environment, with_pip=True)
    python = binaries / "python"
    bare = {**os.environ, "PATH": "/nonexistent", "CC": "/nonexistent"}

    run(python, "-m", "pip", "install", "--only-binary=:all:", source, env=bare | QUICK)

    modules = (
        "cachefs.rpc, cachefs.index, cachefs.segment, cachefs.cli, cachefs.publishing.helper, cachefs_tools.cachectl"
    )
    run(python, "-c", f"import {modules}", env=bare)
    assert list(environment.rglob("cachefs/hooks/startup/sitecustomize.py"))
    assert len(list(environment.rglob("cachefs_daemon/web/static/*"))) == 4
    assert not list(environment.rglob("cachefs/**/*.so"))
    assert not list(environment.rglob("cachefs?bench*"))
    names = "from cachefs.planning.sequences.sampler import SamplerSpec, epoch_order"
    order = run(
        python, "-c", f"{names}; print(epoch_order(SamplerSpec(kind='torch-random', size=6), epoch=1))", env=bare
    )
    assert order == "[5 2 1 3 4 0]\n"
    mount = subprocess.run([binaries / "cachefs", "mount", "demo", "/mnt"], env=bare, capture_output=True, text=True)
    assert mount.returncode == 1
    way_out = f"install libfuse3-dev and fuse3, then: {python} -m pip install '{source}[mount]'"
    assert mount.stderr == f"mount.cachefs: mounting needs pyfuse3; {way_out}\n"
    said = {name: helped(binaries / name, bare) for name in COMMANDS}
    assert said == {name: EXTRAS.get(name, "") for name in COMMANDS}
    assert "SPEC" in run(binaries / "cachefs", "mount", "--help", env=bare)


@pytest.mark.packaging
@pytest.mark.timeout(400)
def test_every_step_of_the_dockerfile_works(tmp_path: Path) -> None:
    root = tmp_path / "root"
    source = tmp_path / "source"
    root.mkdir()
    source.mkdir()
    copy_context(source)
    bin_directory = root / "opt/cachefs/bin"

    for command in (step.arguments for step in dockerfile() if step.instruction == "RUN"):
        if "apt-get install" in command:
            packages = command.partition("--no-install-recommends ")[2].partition("&&")[0]
            run("apt-get", "install", "--simulate", "-y", "--no-install-recommends", *packages.split())
        else:
            here = re.sub(r"(?<=\s)/(?=opt|etc|run|var)", f"{root}/", command)
            here = here.replace("python3 -m venv", f"{sys.executable} -m venv")
            run("sh", "-c", here.replace("--no-cache-dir ", ""), env=os.environ | QUICK, cwd=source)

    assert (root / "var/lib/cachefs").stat().st_uid == 1000
    command = next(step.arguments for step in dockerfile() if step.instruction == "CMD")
    assert command == '["cachefsd"]'
    assert "dataset" in run(bin_directory / "cachectl", "--help")
    assert "SPEC" in run(bin_directory / "mount.cachefs", "--help")
    assert "--check-config" in run(bin_directory / "cachefsd", "--help")
    run(bin_directory / "cachefsd", "--check-config")
    assert list(root.rglob("_zero_open*.so")), "the image would mount without zero-open"
    assert list(root.rglob("_shuffle*.so")), "the image would shuffle in Python"
    assert list(root.rglob("_batch_io*.so")), "the daemon's threads would wait for each other"
    assert list(root.rglob("_process*.so")), "`cachefs run` would let Python ask the mount about each file"


@pytest.mark.parametrize("script", ["build-deb", "build-wheel", "debian/postinst", "debian/postrm", "debian/prerm"])
def test_scripts_of_packages_can_be_read_by_a_shell(script: str) -> None:
    run("sh", "-n", REPOSITORY / "tools/packages" / script)


def test_every_command_has_a_manual_page_that_groff_takes_without_a_warning(tmp_path: Path) -> None:
    run(sys.executable, REPOSITORY / "tools/packages/manpages.py", tmp_path)
    pages = {page.name.rpartition(".")[0]: page for page in tmp_path.rglob("*.[158]")}
    assert pages.keys() == {*COMMANDS, "cachefsd.toml"}
    assert "dataset add" in pages["cachectl"].read_text()
    assert "require_mount" in pages["cachefsd.toml"].read_text()
    assert "shield=auto|on|off" in pages["cachefsd.toml"].read_text()
    assert "page_cache_budget" in pages["mount.cachefs"].read_text()
    assert "<!--" not in pages["cachefsd.toml"].read_text()
    for page in pages.values():
        assert run("groff", "-Kutf8", "-man", "-Tutf8", "-ww", "-z", page) == ""


def test_benchmarks_are_a_distribution_of_their_own() -> None:
    """It has all packages of cachefs_bench, and that of users has none."""
    tools = configparser.ConfigParser()
    tools.read(REPOSITORY / "tools" / "setup.cfg")
    found = (REPOSITORY / "tools").glob("cachefs_bench/**/__init__.py")
    there = {".".join(path.parent.relative_to(REPOSITORY / "tools").parts) for path in found}
    assert {name for name in tools["options"]["packages"].split("\n") if name} == there
    assert not [name for name in SETUP["options"]["packages"].split("\n") if name in there]


def test_the_manifest_names_what_is_there() -> None:
    """Documents, and all that makes packages, are in the source distribution."""
    command, words = zip(
        *(line.split(maxsplit=1) for line in (REPOSITORY / "MANIFEST.in").read_text().splitlines()), strict=True
    )
    named = [
        word for kind, text in zip(command, words, strict=True) if kind in ("include", "graft") for word in text.split()
    ]
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
    assert {"docs", "CHANGELOG.md", "tools/packages"} <= set(named)
