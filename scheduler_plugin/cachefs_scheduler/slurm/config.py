"""The configuration of cachefs-slurm-hint: a TOML file."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from cachefs.errors import ConfigError
from cachefs_scheduler.config import AbsolutePath, OptionalPath, SchedulerSection, problem_lines

DEFAULT_PATH: Final = Path("/etc/cachefs/slurm-hint.toml")
_ADDRESS: Final = re.compile(r"unix:/.+|https://[^/\s]+|http://(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?")


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError("expected unix:/PATH, https://HOST:PORT, or http:// on this machine")
    return text


class SlurmSection(SchedulerSection):
    """[slurm]: Slurm's commands, and what Slurm is told."""

    commands: OptionalPath = Field(
        default=None,
        description="directory of scontrol, squeue and sinfo; without it they are found in PATH",
    )
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = Field(
        default="",
        description="part of the names of jobs in the service (`slurm:CLUSTER/JOBID`), if the service serves several "
        "clusters of Slurm",
    )
    interval: Annotated[float, Field(ge=0.2, le=600)] = Field(
        default=5.0,
        description="seconds between two looks at nodes and jobs. Looks that take long are less frequent",
    )
    calls_per_second: Annotated[float, Field(gt=0, le=100)] = Field(
        default=10.0, description="calls of scontrol that change something, in a second"
    )
    hint_file: AbsolutePath = Field(
        default=Path("/run/cachefs-slurm-hint/hints"),
        description="the file that Lua reads; `cachefs.file` in job_submit.lua names another one. Keep it on a local "
        "disk: a file system that hangs would hold up slurmctld",
    )
    hints_last: Annotated[int, Field(ge=2, le=86400)] = Field(
        default=60, description="seconds after the service's last answer from which on Lua ignores the file"
    )
    datasets: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=200,
        description="datasets for which nodes get features; those with most cached bytes come first, and one node gets "
        "at most 400 features",
    )
    oldest: Annotated[float, Field(gt=0, le=30 * 86400)] = Field(
        default=600.0, description="seconds for which the last report of a silent node counts"
    )
    wait: Literal["begin", "hold"] = Field(
        default="begin",
        description="how jobs with the policy `suspend` wait: with `begin` their begin time is put off by `wait_for` "
        "seconds again and again, so they start if this program stops; with `hold` they are held until they are "
        "released",
    )
    wait_for: Annotated[int, Field(ge=4, le=86400)] = Field(
        default=120, description="seconds by which a begin time is put off"
    )


class ServiceAddressSection(SchedulerSection):
    """[service]: address and certificates of cachefs-scheduler."""

    address: Annotated[str, AfterValidator(_address)] = Field(
        default="unix:/run/cachefs-scheduler/cachefs-scheduler.sock",
        description="where cachefs-scheduler answers: `unix:/PATH`, `https://HOST:PORT`, or `http://` on this machine",
    )
    tls_ca: OptionalPath = Field(
        default=None, description="for `https://`: file (PEM) with the authority of the service's certificate"
    )
    tls_cert: OptionalPath = Field(
        default=None, description="for `https://`: file (PEM) with this program's own certificate"
    )
    tls_key: OptionalPath = Field(
        default=None, description="for `https://`: file (PEM) with the key of that certificate"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        return self


class SlurmHintConfig(SchedulerSection):
    """The whole configuration. docs/site/generated.py makes slurm-hint.toml and the table of docs/configuration.md from
    it: see `cachefs_daemon.section`."""

    service: ServiceAddressSection = ServiceAddressSection()
    slurm: SlurmSection = SlurmSection()


def load(path: Path | None) -> SlurmHintConfig:
    """Load the file; without *path*, the defaults if the default file does not exist. Raises ConfigError."""
    chosen = path or DEFAULT_PATH
    try:
        return SlurmHintConfig.model_validate(tomllib.loads(chosen.read_text()))
    except FileNotFoundError:
        if path is None:
            return SlurmHintConfig()
        raise ConfigError(f"{chosen}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{chosen}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{chosen}: {error}") from None
    except ValidationError as error:
        raise ConfigError("; ".join(f"{chosen}: {one}" for one in problem_lines(SlurmHintConfig, error))) from None
