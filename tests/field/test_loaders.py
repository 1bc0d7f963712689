"""Libraries that read training data out of one large file: each finds on a mount what it finds at the origin."""

import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from tests.daemon import Daemon
from tests.mounting import mounted
from tests.warm_python import WarmPython

# `python -c USE ROOT`: prints what each library finds, itself and in a forked process.
USE = """
import json, multiprocessing, sqlite3, sys, tarfile, zipfile
import numpy, torch

def database(root, options):
    return sqlite3.connect(f"file:{root}{options}", uri=True).execute("select v from t where k = 7").fetchone()

def use(root):
    private = numpy.load(f"{root}/n.npy", mmap_mode="c")
    private[0] = 5
    return {
        "sqlite": database(root, "/s.db?mode=ro"),
        "sqlite with a log": database(root, "/wal.db?immutable=1"),
        "zip": zipfile.ZipFile(f"{root}/z.zip").read("d/7.txt").decode(),
        "tar": tarfile.open(f"{root}/t.tar").extractfile("7").read().decode(),
        "torch.load": float(torch.load(f"{root}/m.pt", mmap=True)["b"].sum()),
        "torch.from_file": float(torch.from_file(f"{root}/raw.f4", shared=False, size=1000).sum()),
        "npz": float(numpy.load(f"{root}/n.npz")["b"].sum()),
        "npy mapped": float(numpy.load(f"{root}/n.npy", mmap_mode="r")[1000:1010].sum()),
        "npy mapped privately": float(private[:3].sum()),
    }

print(json.dumps(use(sys.argv[1])))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(json.dumps(pool.apply(use, [sys.argv[1]])))
"""
MAKE = """
import sys, torch
torch.manual_seed(1)
torch.save({"a": torch.rand(1000, 100), "b": torch.rand(100, 10)}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def roots(torch_jobs: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The origin and the mount."""
    home = tmp_path_factory.mktemp("loaders")
    top = home / "origin"
    top.mkdir()
    for name, mode in (("s.db", "delete"), ("wal.db", "wal")):
        database = sqlite3.connect(top / name)
        database.execute(f"pragma journal_mode={mode}")
        database.execute("create table t (k, v)")
        database.executemany("insert into t values (?, ?)", [(number, f"v{number}") for number in range(1000)])
        database.commit()
        database.close()
    with zipfile.ZipFile(top / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(300):
            archive.writestr(f"d/{number}.txt", f"text {number}" * 100)
    with tarfile.open(top / "t.tar", "w") as tar:
        for number in range(300):
            info = tarfile.TarInfo(str(number))
            info.size = 5000
            tar.addfile(info, io.BytesIO(b"%05d" % number * 1000))
    generator = numpy.random.default_rng(1)
    numpy.savez(top / "n.npz", a=numpy.zeros(100_000), b=numpy.arange(10))
    numpy.save(top / "n.npy", generator.random(1_000_000))
    generator.random(1000).astype("f4").tofile(top / "raw.f4")
    made = torch_jobs.run([sys.executable, "-c", MAKE, top / "m.pt"], timeout=200)
    assert made.returncode == 0, made.stderr
    with Daemon(home / "n") as daemon:
        daemon.add_dataset("files", f"file://{top}")
        with mounted(daemon.socket, "files", home / "mnt") as mount:
            yield top, mount


def test_libraries_find_the_same(torch_jobs: WarmPython, roots: tuple[Path, Path]) -> None:
    found = [found_in(torch_jobs.run([sys.executable, "-c", USE, root], timeout=200)) for root in roots]
    assert found[0] == found[1]
    assert found[1][0] == found[1][1], "a process that was forked finds the same"


def found_in(done: "subprocess.CompletedProcess[str]") -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
