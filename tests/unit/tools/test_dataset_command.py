"""What cachectl says of how a dataset is reached."""

import click
import msgspec
import pytest

from cachefs.messages import DatasetDetail, DatasetSetResult, DatasetView, OriginChange, OriginOptions, UnusableKey
from cachefs_tools.cachectl.dataset import (
    TierQuota,
    dataset,
    describe,
    describe_set,
    limits_text,
    nondefault_options,
    parse_quota,
    shown_url,
)


def test_every_option_of_an_origin_can_be_given_and_changed() -> None:
    fields = {one.name for one in msgspec.structs.fields(OriginOptions)}
    assert {one.name for one in msgspec.structs.fields(OriginChange)} == fields
    for command in ("add", "set"):
        assert fields <= {one.name for one in dataset.commands[command].params}


def test_options_are_shown_but_for_defaults() -> None:
    assert nondefault_options(OriginOptions()) == []
    options = OriginOptions(endpoint_url="http://ceph:7480", addressing_style="path", anonymous=True)
    assert nondefault_options(options) == [
        ("endpoint", "http://ceph:7480"), ("addressing style", "path"), ("anonymous", "yes"),
    ]  # fmt: skip


def view(name: str, reached: str = "", **more: float) -> DatasetView:
    return DatasetView(
        name=name, url="s3://photos", snapshot="0" * 32, path="", files=1, directories=0, bytes=1, created_ns=0,
        reached=reached, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_datasets_of_one_url_are_told_apart() -> None:
    one, two = view("one"), view("two", "http://ceph, region eu")
    assert shown_url(one, [one]) == "s3://photos"
    assert shown_url(one, [one, two]) == "s3://photos (default endpoint)"
    assert shown_url(two, [one, two]) == "s3://photos (http://ceph, region eu)"


def test_what_was_set_is_said_as_it_was_and_as_it_is() -> None:
    before, now = OriginOptions(endpoint_url="http://a", region="eu"), OriginOptions(endpoint_url="http://b")
    reached = DatasetSetResult(dataset=view("d"), before=before, now=now, looked_at=10, alike=8)
    assert describe_set(reached, is_limited=False) == [
        "d: endpoint http://a -> http://b",
        "d: region eu -> default",
        "checked 10 objects: 8 are as they were listed; cached blocks stay",
        "others have changed: run `cachectl dataset refresh d`",
    ]
    nothing = DatasetSetResult(dataset=view("d"), before=now, now=now)
    assert describe_set(nothing, is_limited=False) == ["d: nothing has changed"]


def room(text: str) -> TierQuota | None:
    return parse_quota(click.Context(click.Command("limit")), click.Option(["--share"]), text)


def test_a_share_is_a_part_or_a_size() -> None:
    assert room("20%") == room("0.2") == TierQuota(share=0.2)
    assert room("200GiB") == TierQuota(most=200 << 30)
    assert room("none") == room("1") == TierQuota()
    for wrong in ("0", "-1", "101%", "much", "0GiB", "nan", ""):
        with pytest.raises(click.BadParameter, match=r"none|percentage"):
            room(wrong)


def test_limits_are_said_in_words() -> None:
    assert limits_text(view("d")) == ""
    assert limits_text(view("d", share=0.2)) == "at most 20.0 % of each tier"
    assert (
        limits_text(view("d", most=200 << 30, ttl=60))
        == "at most 200 GiB of each tier, dropped when not read for 1 min 0 s"
    )


@pytest.mark.parametrize(("options", "start"), [(OriginOptions(), 11), (OriginOptions(requester_pays=True), 15)])
def test_the_lines_of_a_dataset_are_aligned(options: OriginOptions, start: int) -> None:
    detail = DatasetDetail(
        view("d", archived=1, problems=2, ttl=60.0),
        1 << 20,
        options,
        {},
        [b""],
        [UnusableKey(b"k", "is none")],
        ["1" * 32],
    )
    lines = describe(detail)
    assert len(lines) == 11 + options.requester_pays
    assert all(line[start - 1] == " " and line[start] != " " for line in lines), lines
