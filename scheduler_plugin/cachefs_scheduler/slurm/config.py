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

    # Directory of scontrol, squeue and sinfo; None: found through PATH.
    commands: OptionalPath = None
    # Part of job names in a service of several clusters: `slurm:CLUSTER/JOBID`.
    cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    # Seconds between polls of nodes and jobs.
    interval: Annotated[float, Field(ge=0.2, le=600)] = 5.0
    # Rate limit of scontrol calls that change something.
    calls_per_second: Annotated[float, Field(gt=0, le=100)] = 10.0
    # The file that Lua reads.
    hint_file: AbsolutePath = Path("/run/cachefs-slurm-hint/hints")
    # Seconds after the service's last answer from which Lua ignores the file.
    hints_last: Annotated[int, Field(ge=2, le=86400)] = 60
    # Datasets with features; the datasets with the most cached data come first.
    datasets: Annotated[int, Field(ge=1, le=1000)] = 200
    # Seconds for which a node's last report counts.
    oldest: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    # How jobs with the policy `suspend` wait: their begin time is postponed, or they are held.
    wait: Literal["begin", "hold"] = "begin"
    # Seconds by which a begin time is postponed; jobs start after this time if this program stops.
    wait_for: Annotated[int, Field(ge=4, le=86400)] = 120


class ServiceAddressSection(SchedulerSection):
    """[service]: address and certificates of cachefs-scheduler."""

    address: Annotated[str, AfterValidator(_address)] = "unix:/run/cachefs-scheduler/cachefs-scheduler.sock"
    # For https: CA of the service's certificate, and the client's certificate and key.
    tls_ca: OptionalPath = None
    tls_cert: OptionalPath = None
    tls_key: OptionalPath = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        return self


class SlurmHintConfig(SchedulerSection):
    """The whole configuration."""

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
