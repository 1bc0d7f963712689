"""Which consumers decide where copies go."""

from dataclasses import replace

import numpy as np

from cachefs.planning.blocks.space import Samples
from cachefs.planning.sequences.sampler_spec import SamplerSpec
from cachefs_cluster.placement.coordinating_group import Extent, choose_coordinator, extent_of
from cachefs_cluster.placement.groups import ConsumerGroup, GroupMember
from cachefs_cluster.sharing.sections import ConsumerFacts
from tests.simulated import space_of

BLOCKS = 100


def group(job: str, blocks: range, ranks: int = 1, loader: str = "") -> tuple[ConsumerGroup, Extent]:
    """One whose members read some blocks, and which is whole with one rank."""
    facts = ConsumerFacts(job, "0" + loader, "ds", "a" * 32, 0, ranks, map=f"{job}{loader}{blocks}")
    extent = np.zeros(BLOCKS, np.bool_)
    extent[blocks.start : blocks.stop] = True
    return ConsumerGroup(job, "a" * 32, loader, None, (GroupMember("n", facts),)), extent


def leader(
    *found: tuple[ConsumerGroup, Extent], before: ConsumerGroup | None = None, elsewhere: tuple[ConsumerGroup, ...] = ()
) -> ConsumerGroup | None:
    extents = {one.maps: extent for one, extent in found}
    key = before.key if before is not None else None
    return choose_coordinator([one for one, _ in found], extents, key, {one.key for one in elsewhere})


TRAINING, VALIDATION = group("job", range(90)), group("job", range(90, 100), loader=".1")


def test_a_group_that_reads_alone_leads_if_it_is_whole() -> None:
    assert leader(TRAINING) is TRAINING[0]
    partly = group("job", range(100), ranks=2)
    assert leader(partly) is None
    assert leader(partly, before=partly[0]) is partly[0], "it has led before a rank ended"
    assert leader(partly, elsewhere=(partly[0],)) is partly[0], "on other nodes"


def test_a_validation_beside_the_training_changes_nothing_whichever_began_first() -> None:
    assert leader(VALIDATION, TRAINING) is TRAINING[0]
    assert leader(VALIDATION, TRAINING, before=VALIDATION[0]) is TRAINING[0]
    unfinished = group("job", range(90, 100), ranks=4, loader=".1")
    assert leader(TRAINING, unfinished) is TRAINING[0]


def test_where_others_read_the_same_blocks_nobody_leads() -> None:
    assert leader(TRAINING, group("other", range(100))) is None
    assert leader(TRAINING, group("other", range(89, 100))) is None
    assert leader(TRAINING, group("other", range(100), ranks=2)) is None, "one that is not whole reads too"


def test_of_groups_that_read_as_much_one_that_leads_goes_on() -> None:
    first, second = group("a", range(50)), group("b", range(50, 100))
    assert leader(first, second) is first[0]
    assert leader(first, second, before=second[0]) is second[0]


def test_an_extent_has_the_blocks_of_all_its_maps() -> None:
    space = space_of([10] * 6)
    one, other = (Samples(space, np.arange(len(ids) + 1), np.array(ids, np.int32)) for ids in ([0, 3], [3, 5]))
    assert extent_of([one, other]).tolist() == [True, False, False, True, False, True]


def test_a_loader_whose_ranks_turn_to_another_sampler_one_after_the_other_goes_on() -> None:
    (some, extent), (one, other) = group("job", range(90), ranks=3), group("job", range(90), ranks=2)
    spec = SamplerSpec(kind="torch-distributed", size=90, replicas=3)
    some = replace(some, spec=spec)
    assert some.name == one.name
    assert leader((some, extent), (one, other), before=some, elsewhere=(some, one)) is some
    whole, _ = group("job", range(90))
    assert leader((some, extent), (whole, other), before=some) is whole
