import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachefs.planning.sequences import plan as module
from cachefs.planning.sequences.plan import Plan
from cachefs.planning.sequences.timeline import ASSUMED_RATE, UNKNOWN_READ
from tests.simulated import space_of

BLOCKS = 12
RATE = 10.0
ALL = np.arange(BLOCKS, dtype=np.int32)
SPACE = space_of([100] * BLOCKS)
ORDERS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=20)


def plan_of(*epochs: list[int], last: bool = True) -> Plan:
    plan = Plan()
    plan.add_space(SPACE)
    for number, order in enumerate(epochs):
        plan.set_epoch("job", "space", number, np.array(order), is_last=last and number == len(epochs) - 1)
    plan.set_progress("job", 0, 0, RATE)
    return plan


def next_use(plan: Plan) -> list[float]:
    return plan.next_use(SPACE.keys(ALL)).tolist()


class PlanMachine(RuleBasedStateMachine):
    """Two consumers publish, read on, skip, jump and stop; next uses are what a search in their sequences finds."""

    @initialize()
    def start(self) -> None:
        self.plan = Plan()
        self.plan.add_space(SPACE)
        self.epochs: dict[str, dict[int, list[int]]] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.rates: dict[str, float] = {}
        self.suspended: set[str] = set()

    @rule(name=st.sampled_from("ab"), ahead=st.integers(0, 2), order=ORDERS)
    def publish(self, name: str, ahead: int, order: list[int]) -> None:
        epoch = self.places.get(name, (0, 0))[0] + ahead
        self.places.setdefault(name, (epoch, 0))
        self.rates.setdefault(name, ASSUMED_RATE)
        self.plan.set_epoch(name, "space", epoch, np.array(order))
        self.epochs.setdefault(name, {})[epoch] = order
        self._go(name, *self.places[name])

    @rule(name=st.sampled_from("ab"), epochs=st.integers(-1, 1), position=st.integers(0, 20), rate=st.floats(0.5, 50))
    def progress(self, name: str, epochs: int, position: int, rate: float) -> None:
        if name not in self.places:
            return
        epoch = self.places[name][0] + epochs
        self.plan.set_progress(name, epoch, position, rate)
        self.rates[name] = rate
        self._go(name, epoch, position)

    @rule(name=st.sampled_from("ab"), suspended=st.booleans())
    def suspend(self, name: str, suspended: bool) -> None:
        self.plan.suspend(name, suspended)
        if name in self.places:
            (self.suspended.add if suspended else self.suspended.discard)(name)

    @rule(name=st.sampled_from("ab"))
    def remove(self, name: str) -> None:
        self.plan.remove_consumer(name)
        for known in (self.epochs, self.places, self.rates):
            known.pop(name, None)
        self.suspended.discard(name)

    @invariant()
    def next_uses_are_right(self) -> None:
        if not hasattr(self, "plan"):
            return
        expected = np.full(BLOCKS, np.inf)
        for name, (epoch, position) in self.places.items():
            if name in self.suspended or not self.epochs[name]:
                continue
            sequence, beyond = self._future(name, epoch)
            reads = [
                next((read for read, block in sequence if block == wanted and read >= position), beyond)
                for wanted in range(BLOCKS)
            ]
            expected = np.minimum(expected, (np.array(reads) - position) / self.rates[name])
        assert next_use(self.plan) == pytest.approx(expected.tolist())

    def _go(self, name: str, epoch: int, position: int) -> None:
        known = {number: one for number, one in self.epochs[name].items() if number >= epoch}
        self.epochs[name] = known
        longest = len(known[min(known)]) * max(1, min(known) - epoch) if known else position
        self.places[name] = (epoch, min(position, longest))

    def _future(self, name: str, epoch: int) -> tuple[list[tuple[int, int]], float]:
        sequence: list[tuple[int, int]] = []
        start, distinct, before = 0, 1, epoch
        length = len(self.epochs[name][min(self.epochs[name])])
        for number, order in sorted(self.epochs[name].items()):
            start += length * (number - before)
            sequence += [(start + read, block) for read, block in enumerate(order)]
            length, distinct, before = len(order), len(set(order)), number
        return sequence, math.ceil(start + length + (BLOCKS / distinct - 0.5) * length)


PlanMachine.TestCase.settings = settings(stateful_step_count=12)
TestPlan = PlanMachine.TestCase


def test_next_use_is_the_distance_over_the_rate_of_the_soonest_consumer() -> None:
    plan = plan_of([3, 1, 2])
    assert next_use(plan)[:4] == [np.inf, 0.1, 0.2, 0.0]
    plan.set_epoch("other", "space", 0, np.array([0, 0, 2]), is_last=True)
    plan.set_progress("other", 0, 0, 100.0)
    assert next_use(plan)[:4] == [0.0, 0.1, 0.02, 0.0]


def test_what_was_read_is_read_again_in_the_next_epoch() -> None:
    plan = plan_of([3, 1, 2], [2, 3, 1])
    plan.set_progress("job", 0, 2, RATE)
    assert next_use(plan)[1:4] == [pytest.approx(0.3), 0.0, pytest.approx(0.2)]
    plan.set_progress("job", 1, 1, RATE)
    assert next_use(plan)[1:4] == [pytest.approx(0.1), np.inf, 0.0]


def test_beyond_the_last_published_epoch_all_blocks_are_expected_half_an_epoch_later() -> None:
    plan = plan_of(list(range(BLOCKS)), last=False)
    plan.set_progress("job", 0, 2, RATE)
    assert next_use(plan)[:3] == [pytest.approx((BLOCKS - 2 + BLOCKS / 2) / RATE)] * 2 + [0.0]


def test_a_quarter_of_the_blocks_per_epoch_means_four_epochs_until_a_block_is_read() -> None:
    plan = plan_of([0, 1, 2], last=False)
    assert next_use(plan)[11] == pytest.approx(math.ceil(3 + 3.5 * 3) / RATE)


def test_reads_out_of_order_are_done() -> None:
    plan = plan_of([3, 1, 2, 0], [0, 1, 2, 3])
    plan.note_early_reads("job", np.array([1, 2]))
    assert next_use(plan)[:4] == [pytest.approx(0.3), pytest.approx(0.5), pytest.approx(0.6), 0.0]
    plan.set_progress("job", 0, 3, RATE)
    assert next_use(plan)[:4] == [0.0, pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.4)]


def test_blocks_of_another_snapshot_are_the_same_blocks() -> None:
    """A refreshed dataset: what a job reads of the old snapshot is needed under either name."""
    plan = plan_of([3, 1, 2])
    refreshed = space_of([100] * (BLOCKS + 3), "refreshed", seed=0)
    plan.add_space(refreshed)
    assert refreshed.key(3) == SPACE.key(3)
    ids = np.array([1, 2, 3, BLOCKS + 1], np.int32)
    assert plan.next_use_of("refreshed", ids).tolist() == [pytest.approx(0.1), pytest.approx(0.2), 0.0, np.inf]
    plan.set_epoch("new", "refreshed", 0, np.array([2, 1]), is_last=True)
    plan.set_progress("new", 0, 0, RATE)
    assert plan.next_use([SPACE.key(2), SPACE.key(1)]).tolist() == [0.0, pytest.approx(0.1)]
    plan.remove_space("space")
    assert plan.consumers() == ["new"]
    assert plan.next_use([SPACE.key(2), SPACE.key(3)]).tolist() == [0.0, np.inf]


def test_blocks_nobody_has_are_refused() -> None:
    plan = plan_of([0])
    for wrong in ([BLOCKS], [-1]):
        with pytest.raises(ValueError, match="beyond the 12 of snapshot space"):
            plan.set_epoch("job", "space", 1, np.array(wrong))
    with pytest.raises(KeyError):
        plan.set_epoch("job", "unknown", 1, np.array([0]))


def test_progress_of_unknown_consumers_and_of_unknown_epochs_is_harmless() -> None:
    plan = plan_of([3, 1, 2])
    plan.set_progress("nobody", 0, 1, RATE)
    plan.set_progress("job", 7, 1, RATE)
    assert next_use(plan) == [np.inf] * BLOCKS
    assert plan.progress("job") == (7, 1)
    plan.set_epoch("job", "space", 7, np.array([5, 6]), is_last=True)
    assert next_use(plan)[6] == 0.0
    plan.remove_consumer("job")
    assert plan.is_empty


def test_a_window_holds_reads_of_one_epoch_and_goes_on_in_the_next() -> None:
    plan = plan_of([3, 1, 2], [2, 3, 1])
    first = plan.window("job", 0, 10)
    assert first is not None
    assert (first.start, first.blocks.tolist(), first.seconds, first.period) == (0, [3, 1, 2], 0.0, 0.1)
    second = plan.window("job", 3, 10)
    assert second is not None
    assert (second.start, second.blocks.tolist(), second.seconds) == (3, [2, 3, 1], pytest.approx(0.3))
    assert plan.window("job", 6, 10) is None
    plan.set_progress("job", 1, 1, RATE)
    later = plan.window("job", 0, 1)
    assert later is not None
    assert (later.start, later.blocks.tolist(), later.seconds) == (4, [3], 0.0)


@given(ORDERS, st.data())
def test_small_steps_and_one_large_step_lead_to_the_same(order: list[int], data: st.DataObject) -> None:
    following = data.draw(ORDERS)
    end = data.draw(st.integers(0, len(order)))
    steps = sorted(data.draw(st.lists(st.integers(0, end), max_size=5)))
    small, large = plan_of(order, following), plan_of(order, following)
    for position in [*steps, end]:
        small.set_progress("job", 0, position, RATE)
    large.set_progress("job", 0, end, RATE)
    assert next_use(small) == next_use(large)


def test_what_was_consumed_can_be_asked_for_until_it_is_forgotten() -> None:
    plan = plan_of(list(range(BLOCKS)))
    mark, _ = plan.consumed_since(0)
    plan.set_progress("job", 0, 2)
    plan.set_progress("job", 0, 3)
    mark, consumed = plan.consumed_since(mark)
    assert consumed is not None
    assert [(snapshot, ids.tolist()) for snapshot, ids in consumed] == [("space", [0, 1]), ("space", [2])]
    assert plan.consumed_since(mark) == (mark, [])
    for _ in range(1100):
        plan.note_early_reads("job", np.array([5]))
    assert plan.consumed_since(mark)[1] is None


def test_unknown_blocks_are_unknown_as_reads() -> None:
    assert plan_of([3, 1, 2]).next_reads("job", ALL[:4]).tolist() == [UNKNOWN_READ, 1, 2, 0]


def test_a_late_epoch_is_not_counted_from_an_early_one() -> None:
    """A job that resumes: the plan has epochs 0 and 1, and the next that is published begins 2^31 reads later."""
    plan = plan_of([0, 1, 2], [2, 1, 0], last=False)
    before = next_use(plan)
    late = 1_000_000_000
    plan.set_epoch("job", "space", late, np.array([5, 4, 3]))
    assert next_use(plan) == before
    plan.set_progress("job", 0, 2)
    assert plan.progress("job") == (0, 2)
    plan.set_progress("job", late, 0, RATE)
    plan.set_epoch("job", "space", late + 1, np.array([3, 4, 5]))
    assert [plan.progress("job"), next_use(plan)[3:6]] == [(late, 0), [0.2, 0.1, 0.0]]


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_leap_to_the_next_epoch_is_planned_as_if_all_had_been_read(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    found = []
    for leap in (0, 100):
        monkeypatch.setattr(module, "_MAX_LEAP", leap)
        plan = plan_of([0, 1, 2, 0], [2, 1, 0, 2], [4, 2])
        plan.set_progress("job", 1, position)
        found.append((plan.progress("job"), next_use(plan)))
    assert found[0] == found[1]
