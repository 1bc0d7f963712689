from pathlib import Path

from cachefs_scheduler.slurm.hint_file import MAX_BYTES, HintHeading, HintStamp, divide_holders, hints_text, write_hints

HEADING = HintHeading(HintStamp(1, 2.0, "boot"), 60, steer=True, wait="begin", wait_for=120, cpus=4)


def test_its_lines() -> None:
    sets = {"a": divide_holders({"n1": 1.0, "n2": 0.5}, [])}
    text = hints_text(HEADING, sets, {"-": {"n1", "n2"}, "gpu": {"n2"}})
    assert text.splitlines() == [
        "cachefs-hints 1", "written 1 2.00 boot", "lasts 60", "steer yes", "wait begin 120", "cpus 4",
        "set a * top1=1 some=2", "set a gpu top1=0 some=1", "end",
    ]  # fmt: skip


def test_it_has_room_for_a_large_cluster_and_is_never_too_large() -> None:
    nodes = {f"n{number}": 1 - number / 4096 for number in range(4096)}
    one = divide_holders(nodes, [])
    sets = {f"{'d' * 60}{number:04}": one for number in range(1000)}
    partitions = {f"p{part}": set(list(nodes)[: 100 + part]) for part in range(50)}
    text = hints_text(HEADING, sets, partitions)
    assert len(text) <= MAX_BYTES
    assert text.endswith("\nend\n")
    assert all(f"\nset {name} * " in text for name in sets)


def test_who_reads_sees_one_or_the_other(tmp_path: Path) -> None:
    file = tmp_path / "made" / "hints"
    write_hints(file, "one")
    with file.open() as opened:
        write_hints(file, "other")
        assert opened.read() == "one"
    assert file.read_text() == "other"
    assert file.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in file.parent.iterdir()] == ["hints"]
