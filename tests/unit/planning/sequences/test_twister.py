"""A generator that is moved ahead gives what it would give, had the outputs between been drawn."""

import numpy
import pytest

from cachefs.planning.sequences import sampler


@pytest.mark.parametrize("drawn", [0, 5, 624, 1000])
@pytest.mark.parametrize("draws", [0, 1, 623, 19_936, 19_937, 19_938, 3_000_001])
def test_the_outputs_that_follow_are_the_same(monkeypatch: pytest.MonkeyPatch, drawn: int, draws: int) -> None:
    outputs = []
    for far in (0, draws + 1):
        monkeypatch.setattr(sampler, "JUMP_DRAWS", far)
        generator = numpy.random.RandomState(drawn + 7)
        generator.randint(0, 2**32, size=drawn, dtype=numpy.uint32)
        sampler.skip_draws(generator, draws)
        outputs.append(generator.randint(0, 2**32, size=2000, dtype=numpy.uint32))
    assert numpy.array_equal(*outputs)


def test_it_may_be_moved_in_several_steps_as_well_as_in_one() -> None:
    """Far beyond what could be drawn one by one."""
    at_once, in_steps = numpy.random.RandomState(1), numpy.random.RandomState(1)
    sampler.skip_draws(at_once, 10**15)
    for step in (10**15 - 10**14, 10**14 - 30_000_000, 30_000_000 - 5, 5):
        sampler.skip_draws(in_steps, step)
    assert at_once.randint(0, 2**32, size=700).tolist() == in_steps.randint(0, 2**32, size=700).tolist()
