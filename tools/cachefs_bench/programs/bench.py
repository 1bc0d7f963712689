"""Measures programs, one after the other: cold, or with everything in the page cache. All runs share their datasets."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cachefs.errors import CachefsError, ConfigError
from cachefs_bench.lab.scratch_node import run_s3_server
from cachefs_bench.lab.slow_link import LinkLimits
from cachefs_bench.programs.catalogue import Program
from cachefs_bench.programs.figures import ProgramOutcome, RunMode, document, warm_document
from cachefs_bench.programs.run import RunSettings, run_mounted_node, run_native, run_on

# Modes compared with a warm page cache.
WARM_MODES = (RunMode.NATIVE, RunMode.MOUNTED, RunMode.RUN)
_FIND = """
import sys
from importlib.util import find_spec
def lacks(name):
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True
print(*filter(lacks, sys.argv[1:]))
"""


class ProgramDatasets:
    """Makes missing datasets in a directory, with tests/programs/make_dataset.py."""

    def __init__(self, directory: Path, files: int, python: str, scripts: Path) -> None:
        """files: number of files of datasets of small files; the sizes of the others follow from it."""
        self._directory, self._files = directory.absolute(), files
        self._python, self._scripts = python, scripts

    def bucket_directory(self, kind: str) -> Path:
        """Return a directory whose only subdirectory, *kind*, is the dataset. Raises CachefsError."""
        buckets = self._directory / f"{kind}-{self._files}"
        if not (buckets / kind).exists():
            buckets.mkdir(parents=True, exist_ok=True)
            unfinished = buckets / f".{kind}"
            command = [
                self._python,
                str(self._scripts / "make_dataset.py"),
                kind,
                str(unfinished),
                "--files",
                str(self._files),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise CachefsError(f"dataset {kind} cannot be made: {done.stderr[-1000:].strip()}")
            unfinished.rename(buckets / kind)
        return buckets


def read_all(directory: Path) -> None:
    """Read all files into the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


class ProgramBench:
    """Runs programs, each run in a directory of its own."""

    def __init__(self, setting: RunSettings, datasets: ProgramDatasets, work: Path) -> None:
        self._setting, self._datasets, self._work = setting, datasets, work
        self._runs = 0

    def missing_modules(self, program: Program) -> list[str]:
        """Return the modules that the program needs and the interpreter does not find. Raises ConfigError."""
        try:
            done = subprocess.run(
                [self._setting.python, "-c", _FIND, "torch", *program.needs], capture_output=True, text=True
            )
        except OSError as error:
            raise ConfigError(f"{self._setting.python} cannot be run: {error.strerror}") from None
        return done.stdout.split()

    def measure_cold(self, program: Program, modes: Sequence[RunMode], turns: int) -> dict[str, Any]:
        """Measure a program with a new node for each run. Of several turns, the one with the median wait counts. Raises
        CachefsError if the program fails."""
        outcomes = {}
        for mode in modes:
            found = sorted((self._run_once(program, mode) for _ in range(turns)), key=lambda outcome: outcome.wait)
            outcomes[mode] = found[turns // 2]
        return document(program, outcomes, self._setting.limits.bandwidth)

    def measure_warm(self, program: Program, turns: int) -> dict[str, Any]:
        """Measure a program whose data is in the page cache, native and mounted in turns. Raises CachefsError."""
        buckets = self._datasets.bucket_directory(program.data)
        work = self._new_directory()
        found: Mapping[RunMode, list[ProgramOutcome]] = {mode: [] for mode in WARM_MODES}
        with (
            run_s3_server(buckets, work / "s3.log") as server,
            run_mounted_node(LinkLimits(), server, program.data, work, guess=True) as node,
        ):
            read_all(node.mountpoint)
            read_all(buckets / program.data)
            for _ in range(turns):
                found[RunMode.NATIVE].append(self._run_native(program))
                for mode in (RunMode.MOUNTED, RunMode.RUN):
                    found[mode].append(run_on(node, self._setting, program, mode, self._new_directory()))
        return warm_document(program, found)

    def _run_once(self, program: Program, mode: RunMode) -> ProgramOutcome:
        if mode is RunMode.NATIVE:
            return self._run_native(program)
        buckets = self._datasets.bucket_directory(program.data)
        work = self._new_directory()
        guess = mode is not RunMode.BARE
        with (
            run_s3_server(buckets, work / "s3.log") as server,
            run_mounted_node(self._setting.limits, server, program.data, work, guess=guess) as node,
        ):
            return run_on(node, self._setting, program, mode, work)

    def _run_native(self, program: Program) -> ProgramOutcome:
        data = self._datasets.bucket_directory(program.data) / program.data
        read_all(data)
        return run_native(self._setting, program, data, self._new_directory())

    def _new_directory(self) -> Path:
        self._runs += 1
        work = self._work / f"r{self._runs}"
        work.mkdir()
        return work
