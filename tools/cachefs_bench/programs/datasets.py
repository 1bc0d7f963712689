"""Datasets of the programs, which are made once and shared by all runs."""

import subprocess
from pathlib import Path

from cachefs.errors import CachefsError


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
