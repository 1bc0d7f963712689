"""What `publish` takes besides the files."""

import pytest

import cachefs


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        cachefs.publish(["/data/a"], worker=4)  # type: ignore[call-arg]


def test_an_option_of_a_sampler_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        cachefs.PublishedSampler([0], ["/data/a"], worker=4)
