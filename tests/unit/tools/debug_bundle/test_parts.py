"""What goes into a bundle."""

from pathlib import Path

from cachefs_tools.debug_bundle.parts import read_tail


def test_the_end_of_a_log_begins_with_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("key=wJalrXUtnFEMI\nnext\nlast\n")
    assert read_tail(log, 100) == log.read_text()
    assert read_tail(log, 14) == "next\nlast\n"  # the rest of a secret would not be known for one
    assert read_tail(log, 10) == "next\nlast\n"
    assert read_tail(log, 9) == "last\n"
