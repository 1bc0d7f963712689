"""Plan, followers, fetch plan and eviction together, on a simulated node: do reads find their blocks, and at what cost?

Nothing here depends on the machine: the clock is simulated, and so are origin and loaders.
"""

from dataclasses import replace

import pytest

from tests.simulated_node import SIZE, SimulatedLoader, SimulatedNode, SimulatedOrigin, bytes_over_belady

FILES, DEMAND = 1200, 150.0


def test_an_origin_slower_than_its_reader_is_asked_in_time() -> None:
    capacity = FILES // 2
    loader = SimulatedLoader(DEMAND, epochs=3)
    node = SimulatedNode(FILES, capacity, SimulatedOrigin(0.75 * DEMAND * SIZE), [loader]).run()
    (job,) = node.jobs
    for epoch in job.figures[1:]:
        assert epoch.stalled < 0.01 * FILES / DEMAND
        assert epoch.late <= 0.005 * FILES
    assert bytes_over_belady(node, capacity) < 1.02


def test_a_job_that_rests_between_epochs_is_fetched_for_in_time() -> None:
    loader = SimulatedLoader(DEMAND, epochs=2, rest=10.0)
    node = SimulatedNode(2 * FILES, FILES, SimulatedOrigin(0.75 * DEMAND * SIZE), [loader]).run()
    (job,) = node.jobs
    assert job.figures[1].stalled < 0.01 * 2 * FILES / DEMAND
    assert job.figures[1].late <= 0.005 * 2 * FILES
    assert bytes_over_belady(node, FILES) < 1.02


def test_two_jobs_share_what_is_fetched_and_do_not_wait() -> None:
    capacity = FILES // 2
    first = SimulatedLoader(DEMAND / 2, epochs=2, batch=8)
    loaders = [first, replace(first, start=8.0)]
    node = SimulatedNode(FILES, capacity, SimulatedOrigin(0.75 * DEMAND * SIZE), loaders).run()
    for job in node.jobs:
        assert job.figures[1].stalled < 0.01 * 2 * FILES / DEMAND
        assert job.figures[1].late <= 0.005 * FILES
    # Two windows of half a second hold 1/16 of what the tier holds.
    assert bytes_over_belady(node, capacity) < 1.12


def test_reads_of_two_jobs_are_told_apart_while_one_rests_between_epochs() -> None:
    slow = SimulatedLoader(DEMAND / 2, epochs=2)
    loaders = [slow, replace(slow, demand=DEMAND, epochs=3, start=8.0)]
    node = SimulatedNode(FILES, FILES // 2, SimulatedOrigin(1.5 * DEMAND * SIZE), loaders).run()
    for job in node.jobs:
        for epoch in job.figures[1:]:
            assert epoch.stalled < 0.01 * FILES / DEMAND
            assert epoch.late <= 0.025 * FILES
    # The loaders read 256 samples at once, 43 % of what the tier holds.
    assert bytes_over_belady(node, FILES // 2) < 1.3


def test_a_job_that_was_killed_goes_on_in_the_midst_of_its_epoch() -> None:
    loader = SimulatedLoader(DEMAND, epochs=2)
    killed, other = replace(loader, batches=110), replace(loader, epochs=3)
    resumed = replace(loader, seed=0, start=27.0, resumes=(1, 1120))
    node = SimulatedNode(2 * FILES, FILES, SimulatedOrigin(1.5 * DEMAND * SIZE), [killed, resumed, other]).run()
    _, again, beside = node.jobs
    # Blocks of the epoch's beginning, for which the origin was asked, are in the way of its first reads.
    assert again.figures[1].stalled < 1.5
    assert again.figures[1].late < 0.1 * 2 * FILES
    assert beside.figures[2].late <= 0.005 * 2 * FILES
    assert bytes_over_belady(node, FILES) < 1.15


@pytest.mark.parametrize("latency", [0.02, 0.05])
def test_an_origin_that_is_fast_enough_is_asked_in_time_and_no_sooner(latency: float) -> None:
    """Its bandwidth seemed to be what readers took of it: 1.08 to 1.09 times what Belady's MIN fetches."""
    files = 400
    loader = SimulatedLoader(200.0, batch=2)
    node = SimulatedNode(files, files // 2, SimulatedOrigin(latency=latency), [loader]).run()
    assert bytes_over_belady(node, files // 2) < 1.02
    assert sum(epoch.late for epoch in node.jobs[0].figures[1:]) == 0


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_fast_reader_has_what_it_wants(share: float) -> None:
    loader = SimulatedLoader(1500, epochs=2)
    files, origin = 3000, SimulatedOrigin(1.5 * 1500 * SIZE)
    node = SimulatedNode(files, round(share * files) + 100, origin, [loader]).run()
    (job,) = node.jobs
    assert job.figures[1].stalled < 0.05 * files / 1500
    assert job.figures[1].late <= 0.005 * files


def test_a_job_that_waits_at_first_is_soon_known_for_what_it_wants() -> None:
    loader = SimulatedLoader(DEMAND, epochs=3)
    node = SimulatedNode(FILES, FILES // 2, SimulatedOrigin(0.75 * DEMAND * SIZE), [loader])
    seen: list[tuple[int, float]] = []
    (job,) = node.jobs

    def look() -> None:
        if job.position is not None:
            seen.append((job.position.follower.progress[0], job.position.follower.rate.demand))
            node.clock.at(node.clock.now + 0.5, look)

    node.clock.at(node.clock.now + 0.5, look)
    node.run()
    in_later_epochs = [demand for epoch, demand in seen if epoch > 1]
    assert max(in_later_epochs) < 1.4 * DEMAND
    assert min(in_later_epochs) > 0.7 * DEMAND


def test_workers_that_begin_their_batches_together_find_their_blocks() -> None:
    """In each round of batches, the last worker's was not fetched until a report had shown how far apart they were: 25
    and 14 reads came late."""
    loader = SimulatedLoader(1e6, epochs=3, workers=8, decode=8 / 400)
    node = SimulatedNode(2 * FILES, FILES, SimulatedOrigin(), [loader]).run()
    for epoch in node.jobs[0].figures[1:]:
        assert epoch.late <= 0.0025 * 2 * FILES
    assert bytes_over_belady(node, FILES) < 1.02
