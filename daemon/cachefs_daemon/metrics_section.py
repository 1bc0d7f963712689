"""[metrics] of the configuration: the address at which Prometheus scrapes the daemon."""

from typing import Annotated

from pydantic import Field

from cachefs_daemon.local_listen import LocalListen
from cachefs_daemon.section import Section


class MetricsSection(Section):
    """[metrics]: address, and the number of datasets with metrics of their own."""

    listen: LocalListen = ""
    datasets: Annotated[int, Field(ge=0, le=200)] = 20
