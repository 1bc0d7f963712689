"""The helper's picture of one consumer: when learned files are worth telling, and which orders are still to be told."""

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

from cachefs.errors import ConfigError
from cachefs.inodes import inode_of
from cachefs.mount_table import MountPoint
from cachefs.planning.sequences.sampler import SamplerSpec
from cachefs.publishing import published_consumer as module
from cachefs.publishing.files import learned
from cachefs.publishing.files.inference import OpenedFiles
from cachefs.publishing.files.rule import DatasetColumn
from cachefs.publishing.files.shares import FileShare, OrderArray
from cachefs.publishing.mount_resolver import MountResolver
from cachefs.publishing.page import WantedSamples
from cachefs.publishing.published_consumer import ConsumerOpening, PublishedConsumer

POINT = MountPoint(Path("/mnt"), "0:1", "cachefs:images")


def order(*samples: int) -> OrderArray:
    return numpy.array(samples, numpy.uint32)


def plain_share(length: int) -> FileShare:
    return FileShare(POINT, 1, numpy.arange(length, dtype=numpy.uint32), numpy.arange(length), length)


PLACES = MountResolver([POINT])


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> PublishedConsumer:
    """Ten samples nobody lists; a file is its own number."""
    monkeypatch.setattr(
        learned, "find_file", lambda path, places: (POINT, inode_of(1, int("".join(filter(str.isdigit, path)))))
    )
    monkeypatch.setattr(module, "find_file", learned.find_file)
    return PublishedConsumer(ConsumerOpening(0, "0", "test", 10, learn=True, compare=True))


def learn(consumer: PublishedConsumer, pairs: list[tuple[int, list[str]]]) -> None:
    for sample, paths in pairs:
        consumer.record_opened(OpenedFiles((sample,), tuple(paths)), PLACES)


def pairs(*samples: int) -> list[tuple[int, list[str]]]:
    return [(sample, [f"/mnt/{sample}"]) for sample in samples]


def test_what_an_epoch_taught_is_told_when_it_is_over(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(1, 2, 3))
    learn(learning, pairs(1, 2, 3))
    assert not learning.use_learned_files()
    learning.set_position(1, 0)
    assert learning.use_learned_files()
    assert learning.shares[0].entries.tolist() == [1, 2, 3]
    assert not learning.use_learned_files()
    learn(learning, pairs(4))
    assert learning.use_learned_files()
    assert not learning.learned.is_full


def test_when_all_is_learned_nothing_is_waited_for(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(*range(10)))
    learn(learning, pairs(*range(9)))
    assert not learning.use_learned_files()
    learn(learning, pairs(9, 10, -1))
    assert learning.learned.is_full
    assert learning.use_learned_files()
    assert not learning.use_learned_files()


def published(consumer: PublishedConsumer, epoch: int) -> list[int]:
    """The files that the daemon is told of for an epoch."""
    [share] = consumer.shares
    found = consumer.order_of_epoch(epoch)
    assert found is not None
    return share.entries[share.file_order(found)].tolist()


def test_an_epoch_with_more_samples_than_were_known_is_published_whole(learning: PublishedConsumer) -> None:
    """A dataset and a sampler without `__len__`, whose epochs become longer."""
    learning.set_order(0, order(*range(10)))
    learn(learning, pairs(*range(10)))
    assert learning.use_learned_files()
    learning.set_position(1, 0)
    longer = [12, *range(12)]
    learning.set_order(1, order(*longer))
    learn(learning, pairs(10, 11))
    assert not learning.learned.is_full
    learning.set_position(2, 0)
    learning.set_order(2, order(*longer))
    assert learning.use_learned_files()
    assert published(learning, 2) == longer[1:]
    learn(learning, pairs(12))
    assert learning.use_learned_files()
    assert published(learning, 2) == longer
    assert learning.unreported_epochs(0) == [2]


def test_an_epoch_with_more_samples_than_were_known_is_published_whole_by_its_rule(
    learning: PublishedConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(files: Sequence[Sequence[str]], places: MountResolver, length: int) -> list[FileShare]:
        entries = [int(one.rpartition("name")[2]) for [one] in files]
        return [FileShare(POINT, 1, numpy.array(entries, numpy.uint32), numpy.arange(len(entries)), length)]

    monkeypatch.setattr(module, "find_shares", found)
    learning.set_columns([DatasetColumn("names", [f"name{number}" for number in range(30)])])
    learn(learning, [(number, [f"/mnt/name{number}"]) for number in range(8)])
    learning.apply_rule(PLACES)
    learning.set_order(0, order(*range(10)))
    assert published(learning, 0) == list(range(10))
    learning.set_position(1, 0)
    learning.set_order(1, order(*range(20, -1, -1)))
    assert learning.has_new_rule
    learning.apply_rule(PLACES)
    assert published(learning, 1) == list(range(20, -1, -1))
    assert learning.unreported_epochs(0) == [1]


def test_a_loader_made_anew_uses_what_the_last_one_taught(learning: PublishedConsumer) -> None:
    learning.set_order(0, order(1, 2))
    learn(learning, pairs(1, 2))
    learning.closes_at = 1.0
    learning.reopen()
    learning.set_order(0, order(2, 1))
    learning.set_position(0, 0)
    assert learning.closes_at is None
    assert learning.use_learned_files()
    assert learning.unreported_epochs(0) == [0]


def test_orders_are_told_once_and_forgotten_when_they_are_over() -> None:
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, order(0, 1, 2))
    consumer.set_order(1, order(2, 1, 0))
    assert consumer.unreported_epochs(0) == [0, 1]
    consumer.reported_orders.update({(0, 0), (0, 1)})
    assert consumer.unreported_epochs(0) == []
    consumer.set_order(1, order(1, 2, 0))
    assert consumer.unreported_epochs(0) == [1]
    assert consumer.set_position(1, 2)
    assert not consumer.set_position(1, 2)
    assert list(consumer.orders) == [1]


def test_a_spec_is_left_to_the_daemon_only_where_samples_are_files() -> None:
    spec = SamplerSpec(kind="sequential", size=3, epochs=5)
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_spec(spec, 0)
    assert consumer.spec_for(consumer.shares[0]) == spec
    assert consumer.unreported_epochs(0) == []

    pairs = FileShare(POINT, 1, order(0, 1, 2, 3, 4, 5), numpy.array([0, 0, 1, 1, 2, 2]), 3)
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[pairs])
    consumer.set_spec(spec, 3)
    assert consumer.spec_for(pairs) is None
    assert consumer.unreported_epochs(0) == [3, 4]
    consumer.set_position(4, 2)
    assert consumer.unreported_epochs(0) == [4, 5]
    assert consumer.position_in(pairs) == 4
    assert consumer.order_of_epoch(5) is None


def test_a_spec_that_no_longer_holds_is_taken_back() -> None:
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)], published=True)
    consumer.set_spec(SamplerSpec(kind="sequential", size=3, epochs=5), 0)
    consumer.set_order(1, order(0, 2, 1))
    assert consumer.spec is None
    assert not consumer.published


def test_orders_of_many_epochs_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ORDER_BYTES", 24)
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 3), shares=[plain_share(3)])
    consumer.set_order(0, order(*range(30)))  # one alone may be longer
    consumer.set_position(1, 0)
    for epoch in (1, 2, 2):
        consumer.set_order(epoch, order(0, 1, 2))
    with pytest.raises(ConfigError, match="the order of epoch 3 of consumer 0 is not kept"):
        consumer.set_order(3, order(0, 1, 2))
    consumer.set_position(2, 0)
    consumer.set_order(3, order(0, 1, 2))


def others(*samples: int) -> list[tuple[int, list[str]]]:
    return [(sample, [f"/mnt/{100 + sample}"]) for sample in samples]


def learned_whole(consumer: PublishedConsumer) -> None:
    consumer.set_order(0, order(*range(10)))
    learn(consumer, pairs(*range(10)))
    assert consumer.use_learned_files()


def test_learned_files_go_on_being_compared_and_are_learned_anew(learning: PublishedConsumer) -> None:
    learned_whole(learning)
    assert learning.wanted_samples is WantedSamples.SOME
    learn(learning, pairs(*range(10)))
    assert not learning.has_wrong_files
    learn(learning, others(*range(5)))
    assert learning.has_wrong_files
    assert learning.wanted_samples is WantedSamples.UNKNOWN
    learning.drop_files()
    learn(learning, others(*range(10)))
    assert learning.use_learned_files()
    assert learning.shares[0].entries.tolist() == list(range(100, 110))


def test_a_dataset_with_other_files_in_each_epoch_is_given_up(learning: PublishedConsumer) -> None:
    learned_whole(learning)
    learn(learning, others(*range(10)))
    learning.drop_files()
    learn(learning, others(*range(10)))
    assert learning.use_learned_files()
    learn(learning, pairs(*range(10)))
    assert learning.has_wrong_files
    learning.drop_files()
    assert learning.wanted_samples is WantedSamples.NONE
    learn(learning, pairs(*range(10)))
    assert not learning.use_learned_files()
    learning.set_order(5, order(*range(12)))
    assert learning.wanted_samples is WantedSamples.NONE, "an epoch with more samples changes nothing of that"


def test_a_rule_of_files_in_a_directory_that_nobody_may_read_is_none(
    learning: PublishedConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[FileShare]:
        raise PermissionError(13, "Permission denied", "/mnt/closed")

    monkeypatch.setattr(module, "find_shares", refuse)
    learning.set_columns([DatasetColumn("names", [f"name{number}" for number in range(10)])])
    learn(learning, [(number, [f"/mnt/name{number}"]) for number in range(8)])
    assert learning.inference is not None
    assert learning.inference.rule is not None
    learning.apply_rule(PLACES)
    assert not learning.shares


def test_a_part_of_an_epoch_is_counted_as_such_until_it_is_over() -> None:
    consumer = PublishedConsumer(ConsumerOpening(0, "0", "test", 4), shares=[plain_share(4)])
    for part, (epoch, begins) in enumerate([(0, 0), (0, 2), (1, 0), (1, 2)]):
        consumer.set_order(part, order(0, 1), (epoch, begins))
    counted = []
    for part in range(4):
        consumer.set_position(part, 1)
        counted.append(consumer.part_in(consumer.shares[0]))
    assert counted == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert list(consumer.parts) == [3]
    consumer.set_spec(SamplerSpec(kind="sequential", size=4), 7)
    assert consumer.part_in(consumer.shares[0]) == (-1, 0)
