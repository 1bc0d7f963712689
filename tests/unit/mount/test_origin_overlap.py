"""A mount must not cover the directory from which the daemon reads a dataset."""

from pathlib import Path

import pytest

from cachefs import mount_table
from cachefs.errors import CachefsError
from cachefs.messages import DatasetView
from cachefs.mount.processes.registration import check_apart_from_origins


def dataset(url: str, name: str = "photos") -> DatasetView:
    return DatasetView(name=name, url=url, snapshot="0" * 32, path="", files=1, directories=1, bytes=1, created_ns=1)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "a photo%"
    (path / "holidays").mkdir(parents=True)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "data" / "a photo%2").mkdir()
    (tmp_path / "bound" / "a photo%").mkdir(parents=True)
    return path


def url_of(path: Path) -> str:
    return f"file://{path}".replace("%", "%25").replace(" ", "%20")


@pytest.mark.parametrize(
    ("below", "says"),
    [("data/a photo%", "would cover the origin of photos (file:///"), ("data", "choose another directory"),
     (".", "would cover the origin"), ("data/a photo%/holidays", "choose a directory outside of it")],
)  # fmt: skip
@pytest.mark.parametrize("through_link", [False, True])
def test_a_directory_that_overlaps_an_origin_is_refused(
    tmp_path: Path, origin: Path, below: str, says: str, *, through_link: bool
) -> None:
    url = url_of(tmp_path / "link" if through_link else origin)
    with pytest.raises(CachefsError) as raised:
        check_apart_from_origins(tmp_path / below, [dataset(url)], [])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mount_covers_no_origin_of_a_dataset_that_it_does_not_show(tmp_path: Path, origin: Path) -> None:
    shown, other = dataset("s3://bucket/x"), dataset(url_of(origin), "other")
    with pytest.raises(CachefsError, match="origin of other"):
        check_apart_from_origins(tmp_path / "data", [shown], [shown, other])
    check_apart_from_origins(origin / "holidays", [shown], [shown, other])


def test_other_directories_are_free(tmp_path: Path, origin: Path) -> None:
    datasets = [dataset(url_of(origin)), dataset(f"file://{tmp_path}/link/absent"), dataset("https://host/data")]
    for free in (tmp_path / "data" / "a photo%2", tmp_path / "bound"):
        check_apart_from_origins(free, datasets, [])


def test_a_bind_mount_of_an_origin_is_the_origin(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel makes a mount on one of two bind mounts on the other as well, where they are shared."""
    table = tmp_path / "mountinfo"
    table.write_text(
        f"22 1 254:0 / / rw - ext4 /dev/root rw\n"
        f"23 22 254:0 {tmp_path}/data {tmp_path}/bound rw - ext4 /dev/root rw\n".replace("a photo", "a\\040photo")
    )
    monkeypatch.setattr(mount_table, "_TABLE", table)
    datasets = [dataset(url_of(origin))]
    for place, says in (("bound", "would cover"), ("bound/a photo%", "would cover"), ("bound/a photo%/x", "is in")):
        with pytest.raises(CachefsError, match=says):
            check_apart_from_origins(tmp_path / place, datasets, [])
    check_apart_from_origins(tmp_path / "bound" / "a photo%2", datasets, [])
    with pytest.raises(CachefsError, match="would cover"):
        check_apart_from_origins(origin, [dataset(url_of(tmp_path / "bound" / "a photo%"))], [])


def test_an_origin_on_a_server_is_known_without_asking_it(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 254:0 / / rw - ext4 /dev/root rw\n31 22 0:57 / {tmp_path}/data rw - nfs4 server:/data rw\n")
    monkeypatch.setattr(mount_table, "_TABLE", table)
    for url in (f"file://{tmp_path}/data/not/listed", f"file://{tmp_path}/to-data/not/listed"):
        (tmp_path / "to-data").unlink(missing_ok=True)
        (tmp_path / "to-data").symlink_to("data")
        for place, says in (("data/not", "would cover"), ("data/not/listed/x", "is in")):
            with pytest.raises(CachefsError, match=says):
                check_apart_from_origins(tmp_path / place, [dataset(url)], [])
