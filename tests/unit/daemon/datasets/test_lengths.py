"""A dataset that other nodes would not take is refused where it is added, or changed."""

import pytest

from cachefs.errors import ConfigError
from cachefs.messages import OriginOptions
from cachefs_cluster.sharing.sections import DATASETS, SharedDataset
from cachefs_daemon.datasets.origin_access import check_lengths
from cachefs_daemon.datasets.stamps import ChangeStamp


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", OriginOptions()),
        ("s3://b", OriginOptions(profile="p" * 1024, anonymous=True)),
        ("s3://b", OriginOptions(profile="p" * 1025)),
        ("s3://b", OriginOptions(region="a\nb")),
        ("s3://" + "b" * 4091, OriginOptions()),
        ("s3://" + "b" * 4092, OriginOptions()),
    ],
)
def test_both_doors_have_the_same_bounds(url: str, options: OriginOptions) -> None:
    value = SharedDataset(
        added=[ChangeStamp(1, "0" * 16)], url=url, options=options, listed=ChangeStamp(1, "0" * 16), snapshot="0" * 32,
        file_size=1, block_size=1,
    )  # fmt: skip
    try:
        check_lengths(url, options)
    except ConfigError:
        with pytest.raises(ValueError, match="at most"):
            DATASETS.decode("data", DATASETS.encode(value))
    else:
        assert DATASETS.decode("data", DATASETS.encode(value)) == value
