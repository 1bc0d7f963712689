"""What a dataset lists, wherever it lies, and without running anything of it."""

import sys
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Subset

from cachefs.publishing.files import listed as module
from cachefs.publishing.files.listed import join_texts, read_listing

NAMES = ["a/1", "b/2", "c/3"]
Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Record:
    image: str
    label: int


class Has:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("paths", "unset")

    def __init__(self) -> None:
        self.paths = NAMES


class OfClass(Has):
    paths = NAMES


TABLE = list(NAMES)
ROOT = "/data/images"


class OfModule(Has):
    def __getitem__(self, index: int) -> str:
        return f"{ROOT}/{TABLE[index]}"


def found(dataset: Any, length: int = len(NAMES)) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in read_listing(dataset).take_columns(length).items()}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Has(im_files=NAMES), "im_files"),
        (Has(names=tuple(NAMES)), "names"),
        (Has(paths=[Path(name) for name in NAMES]), "paths"),
        (Has(paths=[PurePosixPath(name) for name in NAMES]), "paths"),
        (Has(files=[name.encode() for name in NAMES]), "files"),
        (Has(files=numpy.array(NAMES)), "files"),
        (Has(files=numpy.array(NAMES, dtype=object)), "files"),
        (Has(files=numpy.array(NAMES, dtype="S")), "files"),
        (Has(files=numpy.array([["x", name] for name in NAMES])), "files.1"),
        (Has(samples=[(0, name) for name in NAMES]), "samples.1"),
        (Has(samples=[Pair(name, 3) for name in NAMES]), "samples.0"),
        (Has(data=[{"label": 1, "image": name} for name in NAMES]), "data.image"),
        (Has(data=[Record(name, 1) for name in NAMES]), "data.image"),
        (Has(reader=Has(samples=[(name, 0) for name in NAMES])), "reader.samples.0"),
        (Has(dataset=Has(dataset=Has(files=NAMES))), "dataset.dataset.files"),
        (Subset(Has(files=NAMES), [0, 1]), "dataset.files"),  # type: ignore[arg-type]
        (Slotted(), "paths"),
        (OfClass(), "paths"),
        (OfModule(), "TABLE"),
    ],
)
def test_texts_are_found(dataset: Any, name: str) -> None:
    assert found(dataset)[name] == NAMES


@pytest.mark.parametrize(
    "values",
    [
        [4, 5, 6],
        numpy.array([4, 5, 6], numpy.uint8),
        torch.tensor([4, 5, 6]),
        [numpy.int64(4), 5, 6],
        range(4, 7),
        numpy.array([4, 5, 6], dtype=object),
    ],
)
def test_numbers_are_found(values: Any) -> None:
    assert found(Has(indices=values))["indices"] == [4, 5, 6]


def test_directories_that_a_dataset_names() -> None:
    dataset = Has(root="/data", nested=Has(directory=Path("/more")), text="no directory", other=b"/bytes", number=3)
    assert read_listing(dataset).roots == ("/data", "no directory", "/bytes", "/more")
    assert ROOT in read_listing(OfModule()).roots


def test_what_is_missing_in_between_is_empty() -> None:
    assert found(Has(masks=["a", None, float("nan")]))["masks"] == ["a", "", ""]


class Trap:
    """Whatever is done with it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")

    def __index__(self) -> int:
        raise AssertionError("its number was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


class Sequences(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the code of a list was run")


class Tuples(tuple[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the code of a tuple was run")


class Texts(str):
    def __str__(self) -> str:
        raise AssertionError("the code of a text was run")


class Dictionaries(dict[str, Any]):
    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("the code of a dictionary was run")


class Properties:
    @property
    def __dict__(self) -> Any:
        raise AssertionError("a property was run")

    @property
    def files(self) -> Any:
        raise AssertionError("a property was run")


def objects(*values: Any) -> Any:
    made = numpy.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        made[place] = value
    return made


class Comparing(type):
    """A class of classes that has code."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"{name} of a class was asked for")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("a class was compared")

    __hash__ = None  # type: ignore[assignment]


class OfComparing(metaclass=Comparing):
    pass


TRAPS = {
    "an object": Trap,
    "an object of a class with code": OfComparing,
    "a list of those objects": lambda: [OfComparing(), OfComparing(), OfComparing()],
    "an array of those objects": lambda: objects(OfComparing(), OfComparing(), OfComparing()),
    "a text, then one of those objects": lambda: ["b", OfComparing(), "c"],
    "tuples that begin with them": lambda: [(OfComparing(),), (OfComparing(),), (OfComparing(),)],
    "a list of objects": lambda: [Trap(), Trap(), Trap()],
    "tuples with objects": lambda: [("a", Trap()), ("b", Trap()), ("c", Trap())],
    "an array of objects": lambda: objects(Trap(), "b", "c"),
    "a text, then objects": lambda: objects("b", Trap(), "c"),
    "a list with code": lambda: Sequences(NAMES),
    "tuples with code": lambda: [Tuples((name,)) for name in NAMES],
    "texts with code": lambda: [Texts(name) for name in NAMES],
    "dictionaries with code": lambda: [Dictionaries(image=name) for name in NAMES],
    "a property of that name": Properties,
    "a list of those": lambda: [Properties(), Properties(), Properties()],
    "a dictionary": lambda: {"a": Trap()},
}


@pytest.mark.parametrize("name", TRAPS)
def test_no_code_of_the_job_is_run(name: str) -> None:
    taken = found(Has(inner=Has(value=TRAPS[name]())))
    assert taken == ({"inner.value.0": ["a", "b", "c"]} if name == "tuples with objects" else {})


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", 3],
        [1, 2, "c"],
        [1, 2, 1 << 80],
        [("a", 1), "b", ("c", 2)],
        [{"image": "a"}, {}, {"image": "c"}],
        [],
        [[], []],
        [1.5, 2.5, 3.5],
        [True, False, True],
        numpy.zeros((3, 3, 3), int),
        torch.zeros(3, 3, dtype=torch.int64),
        torch.zeros(3),
    ],
)
def test_what_is_of_several_kinds_is_left_out(values: Any) -> None:
    taken = found(Has(values=values))
    assert all(len(of_one) == 3 and len(set(map(type, of_one))) == 1 for of_one in taken.values())
    assert not any("a" in of_one for of_one in taken.values())


def test_what_is_large_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 1000)
    dataset = Has(
        array=numpy.broadcast_to(numpy.int64(0), (1 << 40,)),
        texts=numpy.broadcast_to(numpy.array("a"), (1 << 40,)),
        tensor=torch.zeros(1 << 11, dtype=torch.int64),
        range=range(1 << 40),
        listed=["a"] * 1001,
        names=NAMES,
    )
    assert list(found(dataset)) == ["names"]
    monkeypatch.setattr(module, "MAX_BYTES", 5)
    assert not found(dataset)


def test_circles_and_crowds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    circle = Has()
    circle.__dict__["itself"] = circle
    assert not found(circle)
    deep = wide = Has(**{f"part{number}": Has(values=NAMES) for number in range(5000)})
    for _ in range(10):
        deep = Has(inner=deep)
    assert not found(deep)
    assert len(found(wide)) <= module.MAX_COLUMNS
    monkeypatch.setattr(module, "COLUMNS_SECONDS", -1.0)
    assert not found(Has(names=NAMES))


class Frame:
    """As a DataFrame of pandas: names of columns, and each column by its place."""

    def __init__(self, **columns: Any) -> None:
        self.columns_of = columns

    @property
    def columns(self) -> Any:
        return objects(*self.columns_of)

    @property
    def iloc(self) -> Any:
        return _ByPlace(self.columns_of)


class _ByPlace:
    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = list(columns.values())

    def __getitem__(self, place: tuple[slice, int]) -> Any:
        return self._columns[place[1]]


class Series:
    __module__ = "pandas"

    def __init__(self, values: Any) -> None:
        self._values = numpy.asarray(values, dtype=None if isinstance(values[0], int) else object)
        self.dtype = self._values.dtype
        self.iloc = self._values

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self) -> Any:
        return self._values


def test_tables_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame, Series=Series))  # type: ignore[arg-type]
    frame = Frame(name=Series(NAMES), label=Series([1, 2, 3]))
    assert found(Has(frame=frame)).items() >= {"frame.name": NAMES, "frame.label": [1, 2, 3]}.items()
    assert found(Has(series=Series(NAMES))) == {"series": NAMES}


def test_parts_of_many_tuples_are_taken_and_joined() -> None:
    samples = [(f"/data/images/{number % 1000}/{number}.jpg", number % 1000) for number in range(20_000)]
    taken = read_listing(Has(samples=samples)).take_columns(len(samples))
    assert list(taken) == ["samples.0", "samples.1"]
    assert join_texts(taken["samples.0"]) == "\0".join(path for path, _ in samples).encode()  # type: ignore[arg-type]


class Label:
    def __format__(self, how: str) -> str:
        raise AssertionError("the code of a label was run")

    __str__ = __repr__ = __format__  # type: ignore[assignment]


def test_a_column_of_a_table_with_a_label_of_the_jobs_own_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame, Series=Series))  # type: ignore[arg-type]
    frame = Frame()
    frame.columns_of = {Label(): Series(NAMES), "name": Series(NAMES)}
    assert found(Has(frame=frame)) == {"frame.name": NAMES}


@dataclass(slots=True)
class SlottedRecord:
    image: str
    label: int


def test_a_list_of_objects_with_slots_is_found() -> None:
    rows = [SlottedRecord(name, number) for number, name in enumerate(NAMES)]
    assert found(Has(rows=rows)) == {"rows.image": NAMES, "rows.label": [0, 1, 2]}


@dataclass
class RecordWithDefaults:
    image: str = ""
    label: int = 0

    @property
    def path(self) -> str:
        raise AssertionError("a property was run")


def test_a_default_value_hides_no_column() -> None:
    rows = [RecordWithDefaults(name, number) for number, name in enumerate(NAMES)]
    for row in rows:
        row.__dict__["path"] = row.image  # which its property hides
    assert found(Has(rows=rows)) == {"rows.image": NAMES, "rows.label": [0, 1, 2]}


def test_a_list_of_objects_costs_no_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLUMNS_SECONDS", 60.0)  # tracemalloc makes it slow
    monkeypatch.setattr(module, "COLUMN_SECONDS", 60.0)
    # Python keeps the attributes of an object in a dictionary from the first time that somebody asks for that.
    rows = [Record(f"{number}.jpg", number) for number in range(20_000)]
    read_listing(Has(rows=rows[:10])).take_columns(10)
    tracemalloc.start()
    try:
        taken = read_listing(Has(rows=rows)).take_columns(len(rows))
        assert len(taken) == 2
        del taken
        assert tracemalloc.get_traced_memory()[0] < 20 * len(rows)
    finally:
        tracemalloc.stop()


def test_a_text_that_cannot_be_told_is_left_out() -> None:
    assert join_texts(["a", "b\0c"]) is None
    assert join_texts(["a", "\ud800"]) is None  # no path has that
    assert join_texts(["a", "", "\udcff"]) == b"a\0\0\xff"


def test_numbers_of_a_mapped_file_are_not_read(tmp_path: Path) -> None:
    numpy.save(tmp_path / "numbers.npy", numpy.arange(3))
    mapped = numpy.load(tmp_path / "numbers.npy", mmap_mode="c")
    plain = numpy.asarray(mapped)
    torch.save(torch.arange(3), tmp_path / "numbers.pt")
    tensors = [torch.from_numpy(plain), torch.load(tmp_path / "numbers.pt", mmap=True)]
    for numbers in (mapped, plain, plain[:], *tensors):
        assert found(Has(numbers=numbers)) == {}
    shared = torch.arange(3).share_memory_()
    for values in (shared, numpy.frombuffer(bytes(24), numpy.int64), numpy.arange(6)[::2]):
        assert list(found(Has(numbers=values))) == ["numbers"]


@pytest.mark.parametrize(
    "values",
    [
        [f"/d/{number}" for number in range(400)],
        [(number, f"/d/{number}") for number in range(400)],
        numpy.array([f"/d/{number}" for number in range(400)]),
        list(range(400)),
    ],
)
def test_a_column_that_takes_long_is_given_up_within_it(monkeypatch: pytest.MonkeyPatch, values: Any) -> None:
    now, looks = 0.0, 0

    def thread_time() -> float:
        nonlocal looks
        looks += 1
        return now

    # Only the thread's own time counts: on a busy machine a list of ImageNet took 5 s of 0.8, and was left out.
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=count(0, 1000).__next__, thread_time=thread_time))
    monkeypatch.setattr(module, "ROWS_PER_PIECE", 10)
    sources = read_listing(Has(names=values)).listed_columns
    whole = {source.name: source.take_entries(100.0) for source in sources}
    assert all(taken is not None and len(taken) == 400 for taken in whole.values())
    assert looks == 40 * len(sources)
    now, looks = 100.1, 0
    assert [source.take_entries(100.0) for source in sources] == [None] * len(sources)
    assert looks == len(sources)


def test_a_column_is_measured_by_all_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    assert list(found(Has(captions=["", "x" * 1000, "y"], names=NAMES))) == ["names"]


def test_texts_that_no_file_is_named_by_are_no_column() -> None:
    assert join_texts(["a", "\ud800"]) is None


def test_a_module_that_is_imported_when_it_is_first_used_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "pandas", Lazy("pandas"))
    assert found(Has(names=NAMES, other=Has(), number=3)) == {"names": NAMES}


class Counted(int):
    """A key whose code is the job's."""


@pytest.mark.parametrize(
    ("dataset", "is_taken"),
    [
        ({1: "/m/b", 0: "/m/a"}, True),
        ({0: ("/m/a", 3), 1: ("/m/b", 4)}, True),
        ({0: 5, 1: 6}, False),
        ({0: ("x.jpg", 3), 1: ("y.jpg", 4)}, False),
        ({0: "/m/a", 2: "/m/b"}, False),
        ({0: "/m/a", Counted(1): "/m/b"}, False),
        ({"0": "/m/a"}, False),
    ],
)
def test_the_rows_of_a_dictionary_are_taken_where_they_have_paths_and_numbers(
    dataset: dict[Any, Any], is_taken: bool
) -> None:
    rows = read_listing(dataset).rows
    assert rows == ([dataset[number] for number in range(len(dataset))] if is_taken else dataset)


def test_the_rows_of_a_large_dictionary_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 0.3 * module.ROW_SECONDS
        return now

    dataset = dict.fromkeys(range(6), "/m/a")
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(module, "ROWS_PER_PIECE", 6)
    assert read_listing(dataset).rows == list(dataset.values())
    monkeypatch.setattr(module, "ROWS_PER_PIECE", 2)
    assert read_listing(dataset).rows is dataset
    assert now < 4 * module.ROW_SECONDS
