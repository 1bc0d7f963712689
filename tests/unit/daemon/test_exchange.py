"""For whom pages are pushed into a mount, as mounts and jobs together tell."""

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any

from cachefs_daemon.exchange import JobAudiences

from cachefs.planning.pagecache.lookahead import Reader


class Jobs:
    """Consumers `a` of snapshot `one`, and `b` of snapshot `two`."""

    def __init__(self) -> None:
        self.consumer_keys: Collection[str] = ("a", "b")
        self.latency = -1.0

    def readers(self, latency: float) -> list[Reader]:
        self.latency = latency
        return [Reader(key, snapshot, 0, 0, 0) for key, snapshot in (("a", "one"), ("b", "two"))]


class Mounts:
    """`m1` and `m2` show snapshot `one`, `all` shows everything."""

    def shows(self, mount: str, snapshot: str, datasets: Iterable[Any]) -> bool:
        assert list(datasets) == ["a record"]
        return mount == "all" or snapshot == "one"


def test_only_who_reads_through_a_mount_what_it_shows_is_its_audience() -> None:
    jobs = Jobs()
    audiences = JobAudiences(Mounts(), jobs, [SimpleNamespace(record="a record")])  # type: ignore[arg-type]
    assert [reader.key for reader in audiences.readers()] == ["a", "b"]

    def of(mount: str) -> tuple[list[str], frozenset[str]]:
        audience = audiences.of(mount, 0.25)
        assert jobs.latency == 0.25
        return [reader.key for reader in audience.here], audience.elsewhere

    assert (of("m1"), of("all")) == ((["a"], frozenset()), (["a", "b"], frozenset()))
    audiences.note("m1", {"a": 100})
    audiences.forget_ended()
    assert (of("m1"), of("m2")) == ((["a"], frozenset()), ([], {"one"}))
    assert of("all") == (["b"], {"one"})
    jobs.consumer_keys = ("b",)
    audiences.forget_ended()
    assert of("m2") == (["a"], frozenset())
