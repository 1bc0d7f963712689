"""The helper's picture of one consumer: when learned files are worth telling, and which orders are still to be told."""

from pathlib import Path

import numpy
import pytest

from cachefs.errors import ConfigError
from cachefs.inodes import inode_of
from cachefs.mount_table import MountPoint
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.publishing import learned
from cachefs.publishing import published_consumer as module
from cachefs.publishing.places import Places
from cachefs.publishing.published_consumer import Opening, PublishedConsumer
from cachefs.publishing.shares import Order, Share

POINT = MountPoint(Path("/mnt"), "0:1", "cachefs:images")


def order(*samples: int) -> Order:
    return numpy.array(samples, numpy.uint32)


def plain_share(length: int) -> Share:
    return Share(POINT, 1, numpy.arange(length, dtype=numpy.uint32), numpy.arange(length), length)


PLACES = Places([POINT])


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> PublishedConsumer:
    """Ten samples nobody lists; a file is its own number."""
    monkeypatch.setattr(learned, "_file", lambda path, places: (POINT, inode_of(1, int(Path(path).name))))
    return PublishedConsumer(Opening(0, "0", "test", 10, learn=True))


def pairs(*samples: int) -> list[tuple[int, list[str]]]:
    return [(sample, [f"/mnt/{sample}"]) for sample in samples]


def test_what_an_epoch_taught_is_told_when_it_is_over(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(1, 2, 3))
    learning.learn(pairs(1, 2, 3), PLACES)
    assert not learning.resolve_learned()
    learning.move(1, 0)
    assert learning.resolve_learned()
    assert learning.shares[0].entries.tolist() == [1, 2, 3]
    assert not learning.resolve_learned()
    learning.learn(pairs(4), PLACES)
    assert learning.resolve_learned()
    assert not learning.learned.is_full


def test_when_all_is_learned_nothing_is_waited_for(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(*range(10)))
    learning.learn(pairs(*range(9)), PLACES)
    assert not learning.resolve_learned()
    learning.learn(pairs(9, 10, -1), PLACES)
    assert learning.learned.is_full
    assert learning.resolve_learned()
    assert not learning.resolve_learned()


def test_a_loader_made_anew_uses_what_the_last_one_taught(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(1, 2))
    learning.learn(pairs(1, 2), PLACES)
    learning.closing = 1.0
    learning.reopen()
    learning.set_order(0, order(2, 1))
    learning.move(0, 0)
    assert learning.closing is None
    assert learning.resolve_learned()
    assert learning.unreported(0) == [0]


def test_orders_are_told_once_and_forgotten_when_they_are_over() -> None:
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, order(0, 1, 2))
    consumer.set_order(1, order(2, 1, 0))
    assert consumer.unreported(0) == [0, 1]
    consumer.reported.update({(0, 0), (0, 1)})
    assert consumer.unreported(0) == []
    consumer.set_order(1, order(1, 2, 0))
    assert consumer.unreported(0) == [1]
    assert consumer.move(1, 2)
    assert not consumer.move(1, 2)
    assert list(consumer.orders) == [1]


def test_a_spec_is_left_to_the_daemon_only_where_samples_are_files() -> None:
    spec = SamplerSpec(kind="sequential", size=3, epochs=5)
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_spec(spec, 0)
    assert consumer.spec_for(consumer.shares[0]) == spec
    assert consumer.unreported(0) == []

    pairs = Share(POINT, 1, order(0, 1, 2, 3, 4, 5), numpy.array([0, 0, 1, 1, 2, 2]), 3)
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[pairs])
    consumer.set_spec(spec, 3)
    assert consumer.spec_for(pairs) is None
    assert consumer.unreported(0) == [3, 4]
    consumer.move(4, 2)
    assert consumer.unreported(0) == [4, 5]
    assert consumer.position_in(pairs) == 4
    assert consumer.order(5) is None


def test_a_spec_that_no_longer_holds_is_taken_back() -> None:
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[plain_share(3)], published=True)
    consumer.set_spec(SamplerSpec(kind="sequential", size=3, epochs=5), 0)
    consumer.set_order(1, order(0, 2, 1))
    assert consumer.spec is None
    assert not consumer.published


def test_orders_of_many_epochs_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ORDER_BYTES", 24)
    consumer = PublishedConsumer(Opening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, order(*range(30)))  # one alone may be longer
    consumer.move(1, 0)
    for epoch in (1, 2, 2):
        consumer.set_order(epoch, order(0, 1, 2))
    with pytest.raises(ConfigError, match="the order of epoch 3 of consumer 0 is not kept"):
        consumer.set_order(3, order(0, 1, 2))
    consumer.move(2, 0)
    consumer.set_order(3, order(0, 1, 2))
