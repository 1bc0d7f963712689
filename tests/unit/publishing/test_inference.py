"""From the first samples and their files to a rule for all of them: rules are found, chance is not taken for one."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.publishing.files.inference import MAX_RULES, MIN_SAMPLES, MatchCounts, OpenedFiles, RuleInference
from cachefs.publishing.files.rule import DatasetColumn, JoinedTexts

LENGTH = 300
Files = Callable[[int], tuple[str, ...]]


def texts(name: str, values: Sequence[str]) -> DatasetColumn:
    return DatasetColumn(name, JoinedTexts("\0".join(values).encode()))


def numbers(name: str, values: Any) -> DatasetColumn:
    return DatasetColumn(name, numpy.asarray(values, numpy.int64))


def after(inference: RuleInference, files: Files, samples: Sequence[int]) -> int | None:
    """How many of the samples it takes until there is a rule."""
    for count, sample in enumerate(samples, 1):
        inference.add_opened(OpenedFiles((sample,), files(sample)))
        if inference.rule is not None:
            return count
    return None


def shuffled(seed: int = 1) -> list[int]:
    return random.Random(seed).sample(range(LENGTH), LENGTH)


def is_right(inference: RuleInference, files: Files) -> bool:
    assert inference.rule is not None
    found = inference.rule.paths_of_all(inference.columns, inference.length)
    assert found == [inference.rule.paths_of(sample, inference.columns) for sample in range(inference.length)]
    return [set(one) for one in found] == [set(files(sample)) for sample in range(inference.length)]


CLASSES = [f"kind_{number * 7 % 11}" for number in range(LENGTH)]
NAMES = [f"{random.Random(number).randrange(10**8):08x}.v{number % 3}.jpg" for number in range(LENGTH)]
IDS = [random.Random(number).randrange(10**6) * LENGTH + number for number in range(LENGTH)]
ORDER = random.Random(3).sample(range(LENGTH), LENGTH)
COLUMNS = [
    texts("names", NAMES),
    texts("classes", CLASSES),
    texts("all", [f"../{kind}/{name}" for kind, name in zip(CLASSES, NAMES, strict=True)]),
    numbers("ids", IDS),
    numbers("order", ORDER),
    numbers("label", [number % 11 for number in range(LENGTH)]),
    texts("kinds", sorted(set(CLASSES))),
    numbers("kind", [sorted(set(CLASSES)).index(kind) for kind in CLASSES]),
    texts("half", NAMES[::2]),
]
STEMS = [name.rpartition(".")[0] for name in NAMES]
RULES: dict[str, Files] = {
    "a name": lambda i: (f"/m/images/{NAMES[i]}",),
    "a stem": lambda i: (f"/m/images/{STEMS[i]}.png",),
    "all before the first dot": lambda i: (f"/m/images/{NAMES[i].split('.')[0]}_mask.png",),
    "a class and a name": lambda i: (f"/m/train/{CLASSES[i]}/{NAMES[i]}",),
    "a class by its number": lambda i: (f"/m/{sorted(set(CLASSES))[COLUMNS[7].values[i]]}/{i:05}.bin",),
    "a relative path": lambda i: (f"/m/{CLASSES[i]}/{NAMES[i]}",),
    "a number in a column": lambda i: (f"/m/COCO_{IDS[i]:012}.jpg",),
    "the sample's number": lambda i: (f"/m/{i:06}/image.png",),
    "the sample's number, not padded": lambda i: (f"/m/frame{i + 17}.png",),
    "an image and a mask": lambda i: (f"/m/images/{NAMES[i]}", f"/m/masks/{STEMS[i]}.png"),
    "a file that all have": lambda i: ("/m/labels.json", f"/m/images/{NAMES[i]}"),
    "a subset": lambda i: (f"/m/images/{NAMES[ORDER[i]]}",),
    "repeated": lambda i: (f"/m/images/{NAMES[::2][i % (LENGTH // 2)]}",),
    "several times each": lambda i: (f"/m/images/{NAMES[::2][i // 2]}",),
    "from the end": lambda i: (f"/m/images/{NAMES[LENGTH - 1 - i]}",),
    "pairs": lambda i: (f"/m/images/{NAMES[i]}", f"/m/images/{NAMES[(i + 41) % LENGTH]}"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_found_from_few_samples(name: str) -> None:
    files = RULES[name]
    inference = RuleInference(COLUMNS, LENGTH)
    count = after(inference, files, shuffled())
    assert count is not None
    assert count <= 4 * MIN_SAMPLES
    expected = files if name != "a file that all have" else lambda i: files(i)[1:]
    for sample in shuffled(2):
        inference.add_opened(OpenedFiles((sample,), files(sample)))
    assert is_right(inference, expected)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_batch_says_as_much_as_its_samples(name: str, is_complete: bool) -> None:
    files, dice = RULES[name], random.Random(7)
    if name == "a file that all have" and not is_complete:
        return  # the file is read once, and is no sample's
    inference = RuleInference(COLUMNS, LENGTH)
    order = shuffled()
    for begin in range(0, LENGTH, 10):
        batch = order[begin : begin + 10]
        paths = [path for sample in batch for path in files(sample)]
        if not is_complete:
            paths = dice.sample(paths, max(1, len(paths) * 2 // 3))
        dice.shuffle(paths)
        inference.add_opened(OpenedFiles(tuple(batch), tuple(paths), is_complete))
    expected = files if name != "a file that all have" else lambda i: files(i)[1:]
    assert is_right(inference, expected)


def test_samples_in_their_order_teach_the_classes_as_they_come() -> None:
    kinds = [f"kind_{number // 60}" for number in range(LENGTH)]
    inference = RuleInference([texts("kinds", kinds), texts("names", NAMES)], LENGTH)
    for sample in range(LENGTH):
        inference.add_opened(OpenedFiles((sample,), (f"/m/{kinds[sample]}/{NAMES[sample]}",)))
        if sample >= MIN_SAMPLES + 60:
            assert is_right(inference, lambda i: (f"/m/{kinds[i]}/{NAMES[i]}",))


# Entries of fewer than four characters are found where neither letters nor digits stand beside them.
@pytest.mark.parametrize(("shortest", "edge"), [(1, "."), (4, "")])
@given(st.data(), st.text("/abm1_", max_size=8), st.text("abz._1", max_size=6), st.randoms(use_true_random=False))
def test_whatever_stands_around_an_entry(
    shortest: int, edge: str, data: st.DataObject, before: str, behind: str, dice: random.Random
) -> None:
    an_entry = st.text("abcxyz019_-. ", min_size=shortest, max_size=12)
    entries = data.draw(st.lists(an_entry, min_size=20, max_size=60, unique=True))

    def files(sample: int) -> tuple[str, ...]:
        return (f"/m/{before}/{entries[sample]}{edge}{behind}",)

    inference = RuleInference([texts("entries", entries), numbers("noise", [3] * len(entries))], len(entries))
    order = dice.sample(range(len(entries)), len(entries))
    after(inference, files, order)
    for sample in order:
        inference.add_opened(OpenedFiles((sample,), files(sample)))
    assert is_right(inference, files)


@given(st.integers(2, 5), st.integers(0, 1 << 30))
def test_a_choice_by_chance_is_not_taken_for_a_rule(choices: int, seed: int) -> None:
    """Where one is adopted by accident, it is retracted within 100 samples."""
    dice = random.Random(seed)
    inference = RuleInference(COLUMNS, LENGTH)
    since = 0
    for sample in dice.sample(range(LENGTH), LENGTH):
        chosen = NAMES[sample] if not dice.randrange(choices) else NAMES[dice.randrange(LENGTH)]
        inference.add_opened(OpenedFiles((sample,), (f"/m/images/{chosen}",)))
        since = since + 1 if inference.rule is not None else 0
        assert since <= 100
    assert inference.rule is None


@given(st.integers(0, 1 << 30))
def test_paths_that_follow_from_nothing_give_no_rule(seed: int) -> None:
    dice = random.Random(seed)
    paths = [f"{dice.getrandbits(32):08x}.jpg" for _ in range(60)]
    inference = RuleInference(COLUMNS, LENGTH)
    assert after(inference, lambda i: (f"/m/{paths[i]}",), range(60)) is None


def test_two_files_of_which_one_is_any_other() -> None:
    """As augmentations do that mix two images: the image itself follows, the other does not."""
    dice = random.Random(5)
    inference = RuleInference(COLUMNS, LENGTH)
    for sample in shuffled():
        other = NAMES[dice.randrange(LENGTH)]
        inference.add_opened(OpenedFiles((sample,), (f"/m/images/{NAMES[sample]}", f"/m/images/{other}")))
    assert is_right(inference, lambda i: (f"/m/images/{NAMES[i]}",))


def test_another_epoch_with_other_files() -> None:
    inference = RuleInference(COLUMNS, LENGTH)
    assert after(inference, RULES["a name"], shuffled()) is not None
    for wrong, sample in enumerate(shuffled(4)):
        inference.add_opened(OpenedFiles((sample,), (f"/m/other/{STEMS[sample]}.webp",)))
        if inference.rule is None:
            assert wrong < 4
            return
    raise AssertionError("it was not retracted")


def test_a_few_damaged_files_are_no_reason_to_give_up() -> None:
    inference = RuleInference(COLUMNS, LENGTH)
    for place, sample in enumerate(shuffled()):
        taken = NAMES[0] if place % 50 == 49 else NAMES[sample]
        inference.add_opened(OpenedFiles((sample,), (f"/m/images/{taken}",)))
    assert is_right(inference, RULES["a name"])


def test_what_is_rejected_does_not_come_again_and_it_ends() -> None:
    inference = RuleInference(COLUMNS, LENGTH)
    known = []
    for sample in shuffled() * 4:
        inference.add_opened(OpenedFiles((sample,), (f"/m/{CLASSES[sample]}/{NAMES[sample]}",)))
        if inference.rule is not None:
            assert inference.rule not in known
            known.append(inference.rule)
            inference.reject_rule()
    assert 1 <= len(known) <= MAX_RULES


@pytest.mark.parametrize(
    "observed",
    [
        OpenedFiles((), ("/m/a",)),
        OpenedFiles((1,), ()),
        OpenedFiles((LENGTH,), ("/m/a",)),
        OpenedFiles((-1,), ("/m/a",)),
        OpenedFiles((1,), ("",)),
        OpenedFiles(tuple(range(LENGTH)), ("/m/a", *(f"/m/{3**power % 9973:x}" for power in range(4000)))),
    ],
)
def test_what_makes_no_sense_is_left_out(observed: OpenedFiles) -> None:
    inference = RuleInference([*COLUMNS, texts("empty", [""]), numbers("none", [])], LENGTH)
    for _ in range(MIN_SAMPLES):
        inference.add_opened(observed)
    assert inference.rule is None


def test_more_than_a_few_and_more_than_a_part() -> None:
    tally = MatchCounts()
    tally.add_samples(2, 2)
    assert not tally.is_too_wrong
    tally.add_samples(1, 1)
    assert tally.is_too_wrong
    tally.add_samples(100, 0)
    assert not tally.is_too_wrong


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_texts_are_what_they_were_made_of(values: list[str]) -> None:
    found = JoinedTexts("\0".join(values).encode())
    assert list(found) == values
    assert [found[row] for row in range(len(found))] == values
    for row, value in enumerate(values):
        if value:
            assert row in found.rows_with(value, len(values))
