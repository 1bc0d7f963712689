"""[metrics] of the configuration: where Prometheus reads what the daemon counts."""

from typing import Annotated

from pydantic import Field

from cachefs_daemon.local_listen import LocalListen
from cachefs_daemon.section import Section


class MetricsSection(Section):
    """[metrics]: what Prometheus is told, and where."""

    listen: LocalListen = ""
    datasets: Annotated[int, Field(ge=0, le=200)] = 20
