"""When a loader counts as not understood, and what is said of it."""

import pytest

from cachefs.job_messages import MAX_NOTE
from cachefs.publishing.notes import MANY, MANY_FILES, Unexplained, Unknown, words


@pytest.mark.parametrize("unknown", Unknown)
def test_a_note_is_one_printable_line_whatever_classes_are_called(unknown: Unknown) -> None:
    for name in ("Pictures", "", "new\nline", "x" * 10_000):
        note = words(unknown, name, name)
        assert note.isprintable()
        assert len(note) <= MAX_NOTE
        assert "docs/publishing.md" in note


def test_many_samples_of_many_files_are_unexplained() -> None:
    unexplained = Unexplained()
    for sample in range(MANY):
        assert not unexplained.are_many
        unexplained.observe(1, (f"/data/{sample}",))
    assert unexplained.are_many


def test_samples_that_are_parts_of_few_files_are_not() -> None:
    unexplained = Unexplained()
    for sample in range(10 * MANY):
        unexplained.observe(1, (f"/data/{sample % (MANY_FILES - 1)}",))
    assert not unexplained.are_many
