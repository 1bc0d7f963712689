"""The programs: a script of tests/programs with its options, its data, and its aim."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cachefs.errors import ConfigError


class AccessPattern(StrEnum):
    """The access pattern of a program, which bounds the share of its waits that can be removed."""

    MAP = "map-style"  # a loader asks a dataset for samples, each of which is a file
    SCATTERED = "scattered"  # random parts of large files
    STREAM = "stream"  # shards, from begin to end
    CHECKPOINT = "checkpoint"
    WRONG = "wrong on purpose"  # reads other files than it seems to


# Share of the waits to remove.
AIMS: Final = {
    AccessPattern.MAP: 0.9,
    AccessPattern.SCATTERED: 0.6,
    AccessPattern.STREAM: 0.6,
    AccessPattern.CHECKPOINT: 0.6,
    AccessPattern.WRONG: 0.0,
}


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the benchmark, and a row of the table."""

    name: str  # on the command line
    title: str  # in the table
    script: str  # in tests/programs, without .py
    data: str  # kind of tests/programs/make_dataset.py
    access: AccessPattern = AccessPattern.MAP
    options: tuple[str, ...] = ()  # arguments of the script
    needs: tuple[str, ...] = ()  # modules beyond torch, torchdata, numpy and PIL, which the tests' environment has

    @property
    def aim(self) -> float:
        """Share of the waits to remove."""
        return AIMS[self.access]


def _without_workers(*options: str) -> tuple[str, ...]:
    """Return options without workers, so that the program itself reads."""
    return ("--workers", "0", *options)


def _record_options(*options: str) -> tuple[str, ...]:
    """Return options of programs whose datasets have three records for each file of the others."""
    return ("--milliseconds", "2", *options)


# fmt: off
PROGRAMS: Final = (
    Program("imagefolder", "ImageFolder, shuffle", "image_folder", "folders", needs=("torchvision",)),
    Program("csv-pil", "CSV + PIL", "csv_images", "identified"),
    Program(
        "wrong-listed", "others than it lists", "wrong_files", "identified", AccessPattern.WRONG,
        ("--how", "listed"),
    ),
    Program(
        "wrong-chance", "one of two by chance", "wrong_files", "identified", AccessPattern.WRONG,
        ("--how", "chance"),
    ),
    Program(
        "wrong-epoch", "other files in each epoch", "wrong_files", "identified", AccessPattern.WRONG,
        ("--how", "epoch"),
    ),
    Program("wrong-pairs", "a mask by chance", "wrong_files", "identified", AccessPattern.WRONG, ("--how", "pairs")),
    Program("csv-pil-0", "CSV + PIL, 0 workers", "csv_images", "identified", options=_without_workers()),
    Program("pandas-pil", "pandas + PIL", "pandas_images", "folders", needs=("pandas",)),
    Program(
        "pandas-tvio", "pandas + torchvision.io", "pandas_images", "folders",
        options=("--reader", "torchvision"), needs=("pandas", "torchvision"),
    ),
    Program(
        "pandas-cv2", "pandas + cv2", "pandas_images", "folders", options=("--reader", "cv2"), needs=("pandas", "cv2")
    ),
    Program(
        "pandas-cv2-0", "pandas + cv2, 0 workers", "pandas_images", "folders",
        options=_without_workers("--reader", "cv2"), needs=("pandas", "cv2"),
    ),
    Program("npz", "npz folders", "npz_folders", "arrays"),
    Program("siamese", "siamese pairs", "siamese_pairs", "folders"),
    Program("sampler-fork", "own sampler, fork", "own_sampler", "folders"),
    Program("sampler-spawn", "own sampler, spawn", "own_sampler", "folders", options=("--start-method", "spawn")),
    Program("sampler-0", "own sampler, 0 workers", "own_sampler", "folders", options=_without_workers()),
    Program("batches-fork", "own batch sampler, fork", "own_sampler", "folders", options=("--sampler", "batches")),
    Program(
        "batches-0", "own batch sampler, 0 workers", "own_sampler", "folders",
        options=_without_workers("--sampler", "batches"),
    ),
    Program("numpy-sampler", "sampler of numpy integers", "own_sampler", "folders", options=("--sampler", "numpy")),
    Program("timm", "timm train.py", "timm_loader", "folders", needs=("timm",)),
    Program(
        "timm-epochs", "timm --use-multi-epochs-loader", "timm_loader", "folders",
        options=("--multi-epochs",), needs=("timm",),
    ),
    Program("infinite", "loader that repeats its sampler", "infinite_loader", "folders"),
    Program("ultralytics", "ultralytics classification", "ultralytics_loader", "folders", needs=("ultralytics", "cv2")),
    Program("accelerate", "accelerate cv_example", "accelerate_pictures", "folders", needs=("accelerate",)),
    Program(
        "accelerate-seed", "accelerate, SeedableRandomSampler", "accelerate_pictures", "folders",
        options=("--seedable",), needs=("accelerate",),
    ),
    Program(
        "accelerate-resume", "accelerate, skip_first_batches", "accelerate_pictures", "folders",
        options=("--seedable", "--resume"), needs=("accelerate",),
    ),
    Program("trainer", "HF Trainer, imagefolder", "hf_trainer", "folders", needs=("transformers", "datasets")),
    Program(
        "trainer-0", "HF Trainer, imagefolder, 0 workers", "hf_trainer", "folders",
        options=_without_workers(), needs=("transformers", "datasets"),
    ),
    Program(
        "trainer-own-0", "HF Trainer, own dataset, 0 workers", "hf_trainer", "folders",
        options=_without_workers("--own"), needs=("transformers", "datasets"),
    ),
    Program("lightning", "Lightning, ImageFolder", "lightning_pictures", "folders", needs=("lightning", "torchvision")),
    Program(
        "lightning-0", "Lightning, ImageFolder, 0 workers", "lightning_pictures", "folders",
        options=_without_workers(), needs=("lightning", "torchvision"),
    ),
    Program("stateful", "StatefulDataLoader", "stateful_loader", "folders"),
    Program("stateful-0", "StatefulDataLoader, 0 workers", "stateful_loader", "folders", options=_without_workers()),
    Program(
        "stateful-resume", "StatefulDataLoader, resume in mid-epoch", "stateful_loader", "folders",
        options=("--resume",),
    ),
    Program(
        "stateful-resume-0", "the same, 0 workers", "stateful_loader", "folders", options=_without_workers("--resume")
    ),
    Program("nodes", "torchdata.nodes, threads", "nodes_pipeline", "folders"),
    # A step of nanoGPT computes for a tenth of a second or more.
    Program(
        "nanogpt", "nanoGPT's get_batch", "memmap_tokens", "tokens", AccessPattern.SCATTERED, ("--milliseconds", "8")
    ),
    Program("hdf5", "HDF5", "record_files", "hdf5", AccessPattern.SCATTERED, _record_options(), ("h5py",)),
    Program(
        "lmdb", "LMDB", "record_files", "lmdb", AccessPattern.SCATTERED,
        _record_options("--format", "lmdb"), ("lmdb",),
    ),
    Program(
        "arrow", "HF datasets, Arrow", "record_files", "arrow", AccessPattern.SCATTERED,
        _record_options("--format", "arrow"), ("datasets",),
    ),
    Program(
        "parquet", "HF datasets, Parquet", "hf_stream", "parquet", AccessPattern.STREAM,
        _record_options("--load"), ("datasets",),
    ),
    Program(
        "hf-stream", "HF datasets, streaming", "hf_stream", "parquet", AccessPattern.STREAM,
        _record_options(), ("datasets",),
    ),
    Program(
        "webdataset", "WebDataset", "webdataset_shards", "webdataset", AccessPattern.STREAM,
        _record_options(), ("webdataset",),
    ),
    Program(
        "mds", "mosaicml-streaming (MDS)", "mds_shards", "mds", AccessPattern.STREAM,
        _record_options(), ("streaming",),
    ),
    Program(
        "tfrecord-torch", "TFRecord in torch", "torch_records", "tfrecord", AccessPattern.STREAM,
        _record_options(), ("tensorflow",),
    ),
    Program(
        "tfdata-records", "tf.data, TFRecord", "tf_data", "tfrecord", AccessPattern.STREAM,
        _record_options("--records"), ("tensorflow",),
    ),
    Program("tfdata-files", "tf.data, files", "tf_data", "folders", needs=("tensorflow",)),
    Program(
        "grain-records", "grain, ArrayRecord", "grain_loader", "array-record", AccessPattern.SCATTERED,
        _record_options(), ("grain",),
    ),
    Program("grain-files", "grain, files", "grain_loader", "folders", options=("--files",), needs=("grain",)),
    Program("dali", "DALI, files", "dali_pictures", "folders", needs=("nvidia.dali",)),
    Program(
        "safetensors", "safetensors", "load_checkpoint", "safetensors", AccessPattern.CHECKPOINT,
        ("--reader", "safetensors"), ("safetensors",),
    ),
    Program("torch-mmap", "torch.load(mmap=True)", "load_checkpoint", "checkpoint", AccessPattern.CHECKPOINT),
)
# fmt: on


def find_programs(names: str) -> list[Program]:
    """Return the programs with these comma-separated names; all for an empty text. Raises ConfigError."""
    known = {program.name: program for program in PROGRAMS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ConfigError(f"no program is named {unknown[0]!r}; --list names all")
    return [known[name] for name in dict.fromkeys(wanted)] if wanted else list(PROGRAMS)
