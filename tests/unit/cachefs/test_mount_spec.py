"""The SPEC of a mount: every text is one, and what it means is what a plain reading of the text says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from cachefs.messages import DatasetView
from cachefs.mount_spec import MountSpec, SpecDataset

NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,5}", fullmatch=True).filter(lambda name: name != "all")
DIGITS = st.text("0123456789abcdef", min_size=1, max_size=6)
PARTS = st.lists(st.tuples(NAMES, st.none() | DIGITS), min_size=1, max_size=4)
TEXTS = st.text("al,@:/x1", max_size=12) | PARTS.map(
    lambda parts: ",".join(name if digits is None else f"{name}@{digits}" for name, digits in parts)
)


@given(TEXTS)
def test_a_spec_is_written_as_it_was_read(text: str) -> None:
    assert str(MountSpec.parse(text)) == text


@given(TEXTS)
def test_a_spec_may_be_written_as_the_table_of_mounts_has_it(text: str) -> None:
    assert MountSpec.parse(f"cachefs:{text}") == MountSpec.parse(text)


@given(TEXTS)
def test_a_spec_of_one_dataset_has_no_comma_and_is_not_all(text: str) -> None:
    spec = MountSpec.parse(text)
    assert spec.is_url == ("://" in text)
    assert spec.is_all == (text == "all")
    assert spec.is_single == (spec.is_url or (text != "all" and "," not in text))


@given(PARTS, NAMES, st.text("0123456789abcdef", min_size=32, max_size=32))
def test_parts_are_what_stands_between_commas(parts: list[tuple[str, str | None]], other: str, snapshot: str) -> None:
    text = ",".join(name if digits is None else f"{name}@{digits}" for name, digits in parts)
    spec = MountSpec.parse(text)
    assert [(part.name, part.digits) for part in spec.datasets] == parts
    for name in [other, *(name for name, _ in parts)]:
        assert spec.has_named(name) == spec.is_showing(name) == (name in [known for known, _ in parts])
        assert spec.is_following(name) == (len(parts) > 1 and (name, None) in parts)
    assert spec.has_pinned(snapshot) == any(digits is not None and snapshot.startswith(digits) for _, digits in parts)


@given(NAMES)
def test_all_names_none_and_shows_every_dataset(name: str) -> None:
    spec = MountSpec.parse("all")
    assert not spec.has_named(name)
    assert spec.is_showing(name)
    assert spec.is_following(name)
    assert not spec.has_pinned("0" * 32)


@pytest.mark.parametrize("url", ["s3://bucket/a,b@c", "file:///data/x"])
def test_a_url_is_one_dataset_whatever_it_contains(url: str) -> None:
    assert MountSpec.parse(url).datasets == (SpecDataset(url),)


def test_no_digits_pin_no_snapshot_and_yet_follow_none() -> None:
    spec = MountSpec.parse("one@,two")
    assert not spec.has_pinned("0" * 32)
    assert [name for name in ("one", "two") if spec.is_following(name)] == ["two"]


def view(name: str, reached: str = "") -> DatasetView:
    return DatasetView(
        name=name, url="s3://photos", snapshot="0" * 32, path="", files=1, directories=0, bytes=1, created_ns=0,
        reached=reached,
    )  # fmt: skip


def test_a_url_that_several_datasets_have_names_none_of_them() -> None:
    spec = MountSpec.parse("s3://photos/")
    assert str(spec.resolve_url([view("one")])) == "one"
    with pytest.raises(
        ConfigError, match=r"2 datasets are at s3://photos/: one \(default endpoint\), two \(http://ceph\); mount one"
    ):
        spec.resolve_url([view("one"), view("two", "http://ceph")])
    with pytest.raises(ConfigError, match="and 995 more"):
        spec.resolve_url([view(f"d{number}") for number in range(1000)])
