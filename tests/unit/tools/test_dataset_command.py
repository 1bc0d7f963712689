"""What `cachectl dataset show` says of how a dataset is reached."""

from cachefs_tools.cachectl.dataset import reached_by

from cachefs.messages import OriginOptions


def test_options_are_shown_but_for_defaults() -> None:
    assert reached_by(OriginOptions()) == []
    options = OriginOptions(endpoint_url="http://ceph:7480", addressing_style="path", anonymous=True)
    assert reached_by(options) == [
        ("endpoint", "http://ceph:7480"), ("addressing style", "path"), ("anonymous", "yes"),
    ]  # fmt: skip
