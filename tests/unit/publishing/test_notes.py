"""When a loader counts as not understood, and what is said of it."""

import pytest

from cachefs.job_messages import MAX_NOTE
from cachefs.publishing.notes import MANY, MANY_FILES, Unexplained, Unknown, known_words, words


@pytest.mark.parametrize("unknown", Unknown)
def test_a_note_is_one_printable_line_whatever_classes_are_called(unknown: Unknown) -> None:
    for name in ("Pictures", "", "new\nline", "x" * 10_000):
        note = words(unknown, name, name)
        assert note.isprintable()
        assert len(note) <= MAX_NOTE
        assert "docs/publishing.md" in note


@pytest.mark.parametrize(
    ("files", "expected"),
    [(MANY, Unknown.FILES), (MANY_FILES, Unknown.FILES), (MANY_FILES - 1, Unknown.PARTS), (1, Unknown.PARTS)],
)
def test_samples_are_unexplained_once_they_are_many(files: int, expected: Unknown) -> None:
    unexplained = Unexplained()
    for sample in range(MANY):
        assert unexplained.unknown is None
        unexplained.observe([sample], (f"/data/{sample % files}",))
    assert unexplained.unknown is expected


def test_samples_that_opened_nothing_say_nothing() -> None:
    """As where all files are in the page cache already."""
    unexplained = Unexplained()
    unexplained.observe(range(10 * MANY), ())
    assert unexplained.unknown is None


def test_a_loader_whose_files_were_inferred_says_so() -> None:
    line = "loader D (train.py:14): 300 samples an epoch, read ahead from epoch 1 on"
    assert known_words("D (train.py:14)", 300, 1, by_rule=False) == line
    inferred = f"{line} (which file each sample reads was inferred from its first reads)"
    assert known_words("D (train.py:14)", 300, 1, by_rule=True) == inferred
