"""What `publish` takes besides the files."""

from pathlib import Path

import pytest

import cachefs
from cachefs.publishing.publication import working_directory


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        cachefs.publish(["/data/a"], worker=4)  # type: ignore[call-arg]


def test_an_option_of_a_sampler_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        cachefs.PublishedSampler([0], ["/data/a"], worker=4)


def test_a_deleted_directory_matters_to_relative_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert working_directory(["a"]) == str(gone)
    gone.rmdir()
    assert working_directory(["/data/a", "/data/b"]) == "/"
    with pytest.raises(FileNotFoundError):
        working_directory(["/data/a", "b"])
