"""How cachefs-slurm-hint asks the real service, over TLS too, and what it says where that fails."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from cachefs.errors import CachefsError
from cachefs.scheduling_messages import PlacementPolicy, PlacementReport, PlacementRequest
from cachefs_bench.lab.ports import free_port
from cachefs_scheduler.slurm.config import ServiceAddressSection
from cachefs_scheduler.slurm.service_client import ServiceClient
from tests.certificates import Authority
from tests.scheduler.running import Scheduler, scheduler

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def address() -> str:
    return f"localhost:{free_port()}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, authority: Authority, address: str) -> Iterator[Scheduler]:
    """It knows of one daemon, which does not run."""
    files = authority.issue("localhost")
    section = {"listen": address, "tls_ca": str(files.ca), "tls_cert": str(files.cert), "tls_key": str(files.key)}
    with scheduler(tmp_path_factory.mktemp("c"), [f"127.0.0.1:{free_port()}"], {"service": section}) as running:
        yield running


def asked(section: ServiceAddressSection, question: Callable[[ServiceClient], Awaitable[Result]]) -> Result:
    async def ask() -> Result:
        async with ServiceClient(section) as client:
            return await question(client)

    return asyncio.run(ask())


def secure(authority: Authority, address: str) -> ServiceAddressSection:
    files = authority.issue("slurm-hint")
    return ServiceAddressSection(address=f"https://{address}", tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)


def test_all_calls_over_tls(service: Scheduler, authority: Authority, address: str) -> None:
    async def question(client: ServiceClient) -> tuple[bool, list[str]]:
        await client.fetch_nodes()
        ask = PlacementRequest(job="slurm:1", dataset="set", policy=PlacementPolicy.SUSPEND)
        go = (await client.request_admission(ask)).go
        await client.fetch_admissions(None)
        await client.report_placed(PlacementReport("slurm:1", ["n1"], ask))
        await client.report_resized(PlacementReport("slurm:1", ["n2"], ask))
        await client.report_ended("slurm:1")
        return go, [one.job for one in (await client.fetch_admissions(None)).jobs]

    # Nothing is known of the dataset, so nothing keeps the job.
    assert asked(secure(authority, address), question) == (True, [])


def test_another_authority_is_not_believed(service: Scheduler, address: str, tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match=f"cachefs-scheduler at https://{address} does not answer: "):
        asked(secure(Authority(tmp_path / "other"), address), lambda client: client.fetch_nodes())


def test_what_the_service_refuses_is_told_in_one_line(service: Scheduler) -> None:
    section = ServiceAddressSection(address=f"unix:{service.socket}")
    with pytest.raises(CachefsError, match=r"^cachefs-scheduler answers /v1/admit with 400: [^\n]+$"):
        asked(section, lambda client: client.request_admission(PlacementRequest(job="no name", dataset="set")))


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(CachefsError, match="does not answer"):
        asked(ServiceAddressSection(address=f"unix:{tmp_path}/none"), lambda client: client.fetch_nodes())


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    section = ServiceAddressSection(address="https://localhost:1", tls_ca=tmp_path / "none")
    with pytest.raises(CachefsError, match=r"^service.tls_ca = '.*/none': No such file or directory$"):
        asked(section, lambda client: client.fetch_nodes())
