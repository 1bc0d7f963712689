"""`cachefs-slurm-hint`: starts the program, runs it, and stops it in order.

`cachefs-slurm-hint --release` releases jobs held for a slot while the service or cachefs-slurm-hint is down. It is
needed only with `wait = "hold"`, since a begin time passes by itself. A systemd timer runs it (slurm/plugin), so that a
long outage does not hold jobs forever.
"""

import asyncio
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click

from cachefs import __version__
from cachefs.errors import CachefsError
from cachefs.extras import require_extra
from cachefs.sizes import parse_duration

with require_extra("scheduler", "cachefs-slurm-hint"):
    from cachefs_scheduler.slurm.config import SlurmHintConfig, load
    from cachefs_scheduler.slurm.feature_keeper import FeatureKeeper
    from cachefs_scheduler.slurm.hint_file import age_and_lifetime
    from cachefs_scheduler.slurm.job_keeper import JobKeeper
    from cachefs_scheduler.slurm.job_records import released_comment
    from cachefs_scheduler.slurm.service_client import ServiceClient
    from cachefs_scheduler.slurm.slurm_commands import SlurmCommands

# Files for administrators to copy.
PLUGIN_DIRECTORY: Final = Path(__file__).parent / "plugin"
_log = logging.getLogger(__name__)
# A pass may take this share of the time: a slow Slurm is asked less often.
_MAX_TIME_SHARE: Final = 0.2
_MAX_PAUSE: Final = 60.0
# Seconds before the next pass if changes are left.
_SHORT_PAUSE: Final = 0.5
# Seconds between checks of the hint file.
CHECK_SECONDS: Final = 2.0


def _duration(context: click.Context, parameter: click.Parameter, text: str | None) -> float:
    try:
        return parse_duration(text) if text is not None else 0.0
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cachefs-slurm-hint")
@click.option(
    "--config", "path", type=click.Path(dir_okay=False, path_type=Path),
    help="Configuration file.  [default: /etc/cachefs/slurm-hint.toml where it exists]",
)  # fmt: skip
@click.option("--files", is_flag=True, help="Print the directory of the Lua files, unit and examples, and exit.")
@click.option("--check-config", is_flag=True, help="Check the configuration, and exit.")
@click.option(
    "--remove", is_flag=True, help="Remove the features of cachefs from all nodes, and the hint file, and exit."
)
@click.option("--release", is_flag=True, help='Release all jobs held by wait = "hold", and exit.')
@click.option(
    "--if-silent", metavar="TIME", callback=_duration,
    help="With --release: only if the service has been silent for this time (30min, 2h).",
)  # fmt: skip
def main(path: Path | None, files: bool, check_config: bool, remove: bool, release: bool, if_silent: float) -> None:
    """Tell Slurm which nodes hold which datasets, and let jobs wait for a copy.

    Runs beside slurmctld, as a user who may change nodes and jobs (SlurmUser or root). Asks cachefs-scheduler, keeps
    node features current, and writes the hint file that cachefs.lua reads. When it ends, Slurm schedules jobs without
    hints.
    """
    if files:
        click.echo(PLUGIN_DIRECTORY)
        return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        config = load(path)
        if check_config:
            click.echo("the configuration is good")
        elif remove:
            asyncio.run(_remove(config))
        elif release:
            asyncio.run(_release(config, if_silent))
        else:
            with _lock_hint_file(config.slurm.hint_file):
                asyncio.run(_run(config))
    except CachefsError as error:
        raise SystemExit(f"cachefs-slurm-hint: {error}") from None
    except OSError as error:
        raise SystemExit(f"cachefs-slurm-hint: {config.slurm.hint_file}: {error.strerror or error}") from None


async def _run(config: SlurmHintConfig) -> None:
    slurm = SlurmCommands(config.slurm.commands, config.slurm.calls_per_second, config.slurm.cluster)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with ServiceClient(config.service) as service:
        features = FeatureKeeper(config, service, slurm)
        jobs = JobKeeper(config.slurm, service, slurm)
        _log.info("asking %s; hints are in %s", config.service.address, config.slurm.hint_file)
        # Each task runs forever, so the first that ends (by a signal or an error) ends the program.
        work = [
            asyncio.create_task(one)
            for one in (
                _keep_features(features, config),
                _keep_jobs(jobs, config),
                jobs.follow_admissions(),
                ended.wait(),
            )
        ]
        done, pending = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()


async def _keep_features(features: FeatureKeeper, config: SlurmHintConfig) -> None:
    loop = asyncio.get_running_loop()
    while True:
        begun = loop.time()
        left = await features.run_pass(loop.time)
        pause = min((loop.time() - begun) / _MAX_TIME_SHARE, _MAX_PAUSE)
        await asyncio.sleep(_SHORT_PAUSE if left else max(config.slurm.interval, pause))


async def _keep_jobs(jobs: JobKeeper, config: SlurmHintConfig) -> None:
    loop = asyncio.get_running_loop()
    while True:
        begun = loop.time()
        await jobs.run_pass()
        took = loop.time() - begun
        # A free slot triggers a pass at once, except while passes take long.
        await asyncio.sleep(min(took / _MAX_TIME_SHARE, _MAX_PAUSE))
        with suppress(TimeoutError):
            async with asyncio.timeout(config.slurm.interval):
                await jobs.changed.wait()


async def _remove(config: SlurmHintConfig) -> None:
    slurm = SlurmCommands(config.slurm.commands, config.slurm.calls_per_second)
    async with ServiceClient(config.service) as service:
        count = await FeatureKeeper(config, service, slurm).remove_features()
    config.slurm.hint_file.unlink(missing_ok=True)
    click.echo(f"removed features of cachefs from {count} nodes")


async def _release(config: SlurmHintConfig, if_silent: float) -> None:
    if if_silent and not await is_silent(config.slurm.hint_file, if_silent):
        click.echo("the service answers cachefs-slurm-hint, which releases jobs itself")
        return
    slurm = SlurmCommands(config.slurm.commands, config.slurm.calls_per_second, config.slurm.cluster)
    click.echo(f"released {await release_all(slurm)} jobs")


async def is_silent(hint_file: Path, seconds: float) -> bool:
    """Return whether the service has been silent for *seconds*, according to the hint file. Waits that long if there is
    no file; returns False as soon as there is a file that Lua would accept."""
    begun = time.monotonic()
    while True:
        known = await asyncio.to_thread(age_and_lifetime, hint_file)
        if known is not None and known[0] <= known[1]:
            return False
        if time.monotonic() - begun >= seconds or (known is not None and known[0] >= seconds):
            return True
        await asyncio.sleep(min(CHECK_SECONDS, seconds))


async def release_all(slurm: SlurmCommands) -> int:
    """Release all jobs held by cachefs, arrays as a whole, and return their number. Raises CachefsError if some remain
    held."""
    count, problems = 0, []
    for job in await slurm.list_jobs():
        if not (job.held and job.tag.held):
            continue
        try:
            await slurm.release_job(job.id, released_comment(job.admin_comment))
        except CachefsError as error:  # for instance, the job has been cancelled meanwhile
            problems.append(str(error))
            continue
        _log.info("job %s is held no longer", job.id)
        count += 1
    if problems:
        raise CachefsError(f"{count} jobs were released, and some are perhaps still held: {problems[0]}")
    return count


@contextmanager
def _lock_hint_file(hint_file: Path) -> Iterator[None]:
    """Lock the hint file. Raises CachefsError if another process writes it."""
    hint_file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = os.open(f"{hint_file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CachefsError(f"{hint_file}: another cachefs-slurm-hint writes it; set hint_file") from None
        yield
    finally:
        os.close(lock)
