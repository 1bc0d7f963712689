"""A Slurm with job_submit.lua, and cachefs-slurm-hint beside its controller."""

import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cachefs_bench.lab.slurm import DEFAULT_SCHEDULER, LabSlurm, run_slurm
from cachefs_scheduler.slurm.hint import PLUGIN_DIRECTORY
from cachefs_tools.child_programs import program_path
from tests.scheduler.slurm.service_double import ServiceDouble, running_double
from tests.servers.process import start, stop
from tests.waiting import until

_QUICK = {"interval": 0.3, "calls_per_second": 50, "hints_last": 60}


class HintedSlurm:
    """All of it runs."""

    service: ServiceDouble  # where there is no real one

    def __init__(self, slurm: LabSlurm, socket: Path, work: Path) -> None:
        self.slurm = slurm
        self._socket = socket
        self.hints = work / "hints"
        self.log = work / "hint.log"
        self._config = work / "slurm-hint.toml"
        self._process: subprocess.Popen[bytes] | None = None

    def start_hint(self, settings: Mapping[str, object] | None = None) -> None:
        """Start cachefs-slurm-hint. settings: of [slurm]."""
        known = {**_QUICK, "hint_file": str(self.hints), **(settings or {})}
        lines = [f"{key} = {value!r}" for key, value in known.items()]
        self._config.write_text("\n".join([f"[service]\naddress = 'unix:{self._socket}'\n[slurm]", *lines, ""]))
        command = [*self.slurm.enter_command, program_path("cachefs-slurm-hint"), "--config", str(self._config)]
        self._process = start(command, self.log, self.slurm.environment)

    def stop_hint(self) -> None:
        """End it, as systemd does."""
        if self._process is not None:
            stop(self._process)
            self._process = None

    def kill_hint(self) -> None:
        """End it at once."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def remove(self) -> str:
        """`cachefs-slurm-hint --remove`."""
        return self.slurm.run_command(program_path("cachefs-slurm-hint"), "--config", str(self._config), "--remove")

    def release(self, *options: str) -> str:
        """`cachefs-slurm-hint --release`."""
        return self.slurm.run_command(
            program_path("cachefs-slurm-hint"), "--config", str(self._config), "--release", *options
        )

    def hold(self, **datasets: Mapping[str, float]) -> None:
        """Each dataset is on these nodes, in these parts; wait until Slurm and Lua know."""
        self.service.parts = {
            node: {name: parts[node] for name, parts in datasets.items() if node in parts} for node in self.slurm.nodes
        }
        for name, parts in datasets.items():
            until(lambda name=name, parts=parts: self.shows(name, parts), f"{name} is known")

    def shows(self, dataset: str, parts: Collection[str]) -> bool:
        """Do Slurm and Lua know that these nodes have some of it, and no others?"""
        some = f"cachefs_{dataset}_some"
        having = {node for node in self.slurm.nodes if some in self.slurm.node_features(node)[1]}
        text = self.hints.read_text() if self.hints.exists() else ""
        return having == set(parts) and any(
            line.startswith(f"set {dataset} * ") and line.endswith(f"some={len(parts)}") for line in text.splitlines()
        )

    def run_on(self, *options: str, script: str = "#!/bin/sh\nsleep 600\n") -> tuple[int, tuple[str, ...]]:
        """Submit a job, and wait until it runs: its number and its nodes."""
        job = self.slurm.submit_job(*options, script=script)
        return job, self.nodes_of(job)

    def nodes_of(self, job: int) -> tuple[str, ...]:
        """Wait until it runs: its nodes."""
        until(lambda: self.slurm.job_state(job)[0] == "RUNNING", f"job {job} runs")
        return self.slurm.job_state(job)[1]

    def cancel(self, *jobs: int) -> None:
        """End jobs, and wait until their nodes are free."""
        self.slurm.run_command("scancel", *map(str, jobs))
        wanted = ",".join(map(str, jobs))
        until(lambda: not self.slurm.run_command("squeue", "--noheader", f"--jobs={wanted}"), f"{wanted} ended")


@contextmanager
def hinted_slurm(work: Path, settings: Mapping[str, object] | None = None) -> Iterator[HintedSlurm]:
    """With a service that says what a test wants."""
    with running_double(work / "api.sock") as service, slurm_asking(service.socket, work, settings) as hinted:
        hinted.service = service
        yield hinted


@contextmanager
def slurm_asking(socket: Path, work: Path, settings: Mapping[str, object] | None = None) -> Iterator[HintedSlurm]:
    """Four nodes of four processors, and a service at a socket."""
    place = work / "slurm"
    place.mkdir()
    with_lua(place, work / "hints")
    with run_slurm(place, scheduler=f"{DEFAULT_SCHEDULER},permit_job_expansion", more="JobSubmitPlugins=lua") as slurm:
        hinted = HintedSlurm(slurm, socket, work)
        hinted.start_hint(settings)
        try:
            yield hinted
        finally:
            hinted.stop_hint()


def with_lua(place: Path, hints: Path) -> None:
    """The Lua files as they are shipped, beside slurm.conf."""
    (place / "cachefs.lua").write_text((PLUGIN_DIRECTORY / "cachefs.lua").read_text())
    text = (PLUGIN_DIRECTORY / "job_submit.lua").read_text()
    (place / "job_submit.lua").write_text(text + f'\nif loaded then cachefs.file = "{hints}" end\n')
