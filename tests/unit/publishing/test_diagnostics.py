"""When a loader counts as not understood, and what is said of it."""

import pytest

from cachefs.job_messages import MAX_NOTE
from cachefs.publishing.diagnostics import (
    MIN_FILES,
    MIN_SAMPLES,
    UnexplainedFiles,
    UnknownProperty,
    known_text,
    unknown_text,
)


@pytest.mark.parametrize("unknown", UnknownProperty)
def test_a_note_is_one_printable_line_whatever_classes_are_called(unknown: UnknownProperty) -> None:
    for name in ("Pictures", "", "new\nline", "x" * 10_000):
        note = unknown_text(unknown, name, name)
        assert note.isprintable()
        assert len(note) <= MAX_NOTE
        assert "docs/publishing.md" in note


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MIN_SAMPLES, UnknownProperty.FILES),
        (MIN_FILES, UnknownProperty.FILES),
        (MIN_FILES - 1, UnknownProperty.PARTS),
        (1, UnknownProperty.PARTS),
    ],
)
def test_samples_are_unexplained_once_they_are_many(files: int, expected: UnknownProperty) -> None:
    unexplained = UnexplainedFiles()
    for sample in range(MIN_SAMPLES):
        assert unexplained.unknown is None
        unexplained.add_opened([sample], (f"/data/{sample % files}",))
    assert unexplained.unknown is expected


def test_samples_that_opened_nothing_say_nothing() -> None:
    """As where all files are in the page cache already."""
    unexplained = UnexplainedFiles()
    unexplained.add_opened(range(10 * MIN_SAMPLES), ())
    assert unexplained.unknown is None


def test_a_loader_whose_files_were_inferred_says_so() -> None:
    line = "loader D (train.py:14): 300 samples an epoch, read ahead from epoch 1 on"
    assert known_text("D (train.py:14)", 300, 1, by_rule=False) == line
    inferred = f"{line} (which file each sample reads was inferred from its first reads)"
    assert known_text("D (train.py:14)", 300, 1, by_rule=True) == inferred
