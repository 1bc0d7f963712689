import pytest

from cachefs_scheduler.slurm.job_records import expand_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n[]", "n]1[", "n[1-99999999]", "r[1-9999]n[1-9999]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no "):
        expand_hostlist(text)
