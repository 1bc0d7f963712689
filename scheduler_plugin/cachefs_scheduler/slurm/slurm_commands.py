"""Runs Slurm's commands, with a deadline and an output limit each, and a rate limit for those that change something."""

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cachefs.errors import CachefsError
from cachefs_scheduler.slurm.job_records import SlurmJob, parse_jobs
from cachefs_scheduler.slurm.node_records import SINFO_FORMAT, FeatureChange, Inventory, parse_nodes

# Slurm's own message timeout is 10 s, and it retries.
_COMMAND_SECONDS: Final = 30.0
_MAX_BYTES: Final = 256 << 20  # a job is about 4 KB
_NAMES: Final = ("scontrol", "squeue", "sinfo")
# With this scheduler parameter, Slurm accepts jobs whose preferred features no node has.
_NEEDED_PARAMETER: Final = "ignore_prefer_validation"


class SlurmCommands:
    """scontrol, squeue and sinfo. All calls raise CachefsError if Slurm does not answer, or refuses."""

    def __init__(self, directory: Path | None, calls_per_second: float, cluster: str = "") -> None:
        self._cluster = cluster
        self._programs = {name: _program(name, directory) for name in _NAMES}
        self._gap = 1 / calls_per_second
        self._next = 0.0  # loop time from which on the next change may be made
        self.changes = 0  # number of calls that changed something

    async def list_nodes(self) -> Inventory:
        """Return all nodes, including those of hidden partitions."""
        text = await self._run("sinfo", "--all", "--Node", "--noheader", f"--format={SINFO_FORMAT}")
        return parse_nodes(text.decode(errors="replace"))

    async def list_jobs(self) -> list[SlurmJob]:
        """Return jobs that read a dataset, including those that ended in the last minutes."""
        return parse_jobs(await self._run("squeue", "--all", "--json"), self._cluster)

    async def can_prefer_any_feature(self) -> bool:
        """Return whether jobs may prefer features that no node has."""
        for line in (await self._run("scontrol", "show", "config")).decode(errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "SchedulerParameters":
                return _NEEDED_PARAMETER in value.strip().split(",")
        return False

    async def set_features(self, change: FeatureChange) -> None:
        """Replace all available and active features of some nodes."""
        await self._run_change(
            "update", f"NodeName={','.join(change.nodes)}", f"AvailableFeatures={','.join(change.available)}",
            f"ActiveFeatures={','.join(change.active)}",
        )  # fmt: skip

    async def postpone_jobs(self, seconds: int, jobs: Sequence[str]) -> None:
        """Set the begin time of pending jobs to *seconds* from now."""
        await self._run_change("update", f"JobId={','.join(jobs)}", f"StartTime=now+{max(0, seconds)}")

    async def release_job(self, job: str, comment: str) -> None:
        """Release a held job, and set its admin comment."""
        await self._run_change("update", f"JobId={job}", f"AdminComment={comment}")
        await self._run_change("release", job)

    async def _run_change(self, *arguments: str) -> None:
        loop = asyncio.get_running_loop()
        wait = self._next - loop.time()
        self._next = max(self._next, loop.time()) + self._gap
        if wait > 0:
            await asyncio.sleep(wait)
        self.changes += 1
        await self._run("scontrol", *arguments)

    async def _run(self, name: str, *arguments: str) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                self._programs[name], *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env={**os.environ, "LC_ALL": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise CachefsError(f"{self._programs[name]} cannot be started: {error.strerror}") from None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(_COMMAND_SECONDS):
                output, problem = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                status = await process.wait()
        except TimeoutError:
            raise CachefsError(f"{name} did not end within {_COMMAND_SECONDS:.0f} s; does slurmctld run?") from None
        finally:
            if process.returncode is None:
                # The whole process group, including children of a wrapper: `wait` does not return while they hold the
                # pipes.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status:
            words = " ".join(problem.decode(errors="replace").split())
            raise CachefsError(f"{name} {' '.join(arguments)[:200]}: {words[:300] or f'status {status}'}")
        return output


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(1 << 18):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise CachefsError(f"the output of a Slurm command has more than {_MAX_BYTES >> 20} MiB")
    return b"".join(parts)


def _program(name: str, directory: Path | None) -> str:
    found = shutil.which(name, path=None if directory is None else str(directory))
    if found is None:
        where = "PATH" if directory is None else str(directory)
        raise CachefsError(f"there is no {name} in {where}; install Slurm's client, or set `commands` in [slurm]")
    return found
