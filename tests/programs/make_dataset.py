"""Makes the datasets of the programs: `make_dataset.py KIND DIRECTORY --files N`. The same N gives the same bytes."""

import argparse
import csv
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
from PIL import Image

# Of images, in pixels. Noise of this size makes files of 50 to 110 KB, whose decoding takes 2 to 3 ms.
SIDE = 256
CLASSES = 20
SHARDS = 8


def image(number: int) -> Image.Image:
    """A picture of noise; the higher its number modulo 4, the less of it can be compressed."""
    rng = numpy.random.default_rng(number)
    coarse = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=numpy.uint8).repeat(8, 0).repeat(8, 1)
    noise = rng.integers(0, 60 + 20 * (number % 4), coarse.shape, dtype=numpy.uint8)
    return Image.fromarray(coarse // 2 + noise)


def image_folders(directory: Path, files: int) -> None:
    """train/CLASS/NAME.jpg, as ImageFolder wants them, and train.csv with a relative path and a class per line."""
    with open(directory / "train.csv", "w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["path", "label"])
        for number in range(files):
            label = number % CLASSES
            path = Path("train", f"n{label:05}", f"picture_{number:06}.jpg")
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            image(number).save(directory / path, quality=95)
            rows.writerow([path, label])


def identified_images(directory: Path, files: int) -> None:
    """images/ID.jpg, and labels.csv with an identifier and a class per line, as competitions give them."""
    (directory / "images").mkdir()
    names = _identifiers(files)
    with open(directory / "labels.csv", "w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["id", "label"])
        for number, name in enumerate(names):
            image(number).save(directory / "images" / f"{name}.jpg", quality=95)
            rows.writerow([name, number % CLASSES])


def _identifiers(count: int) -> list[str]:
    drawn = numpy.random.default_rng(0).integers(0, 16**8, 2 * count)
    return [f"{number:08x}" for number in dict.fromkeys(drawn.tolist())][:count]


def array_folders(directory: Path, files: int) -> None:
    """CASE/volume.npz with an image and a mask, as medical datasets have them."""
    rng = numpy.random.default_rng(0)
    for number in range(files):
        (directory / f"case{number:05}").mkdir()
        volume = rng.integers(0, 255, (5, 128, 128), dtype=numpy.uint8)
        numpy.savez(directory / f"case{number:05}" / "volume.npz", image=volume, mask=volume[0] > 127)


def tokens(directory: Path, files: int) -> None:
    """train.bin: 16-bit tokens, as nanoGPT prepares them; 250 KB for each file that others have."""
    numpy.random.default_rng(0).integers(0, 50_257, files * 125_000, dtype=numpy.uint16).tofile(directory / "train.bin")


def checkpoint(directory: Path, files: int) -> None:
    """model.pt: tensors of 8 MB each, 320 KB for each file that others have."""
    import torch

    torch.manual_seed(0)
    layers = {f"layers.{number}.weight": torch.rand(1024, 2048) for number in range(files // 25)}
    torch.save(layers, directory / "model.pt")


def safe_checkpoint(directory: Path, files: int) -> None:
    """model.safetensors, likewise."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    layers = {f"layers.{number}.weight": torch.rand(1024, 2048) for number in range(files // 25)}
    save_file(layers, directory / "model.safetensors")


# --- records in large files: three pictures for each file that others have --------------------------------------------


def records(files: int) -> Iterator[tuple[int, bytes, int]]:
    """(number, bytes of a JPEG, class) of each record."""
    for number in range(3 * files):
        buffer = io.BytesIO()
        image(number).save(buffer, "jpeg", quality=95)
        yield number, buffer.getvalue(), number % CLASSES


def hdf5(directory: Path, files: int) -> None:
    """train.h5: pictures as arrays, each a chunk, and their classes."""
    import h5py

    with h5py.File(directory / "train.h5", "w") as file:
        shape = (2 * files, SIDE, SIDE)
        pictures = file.create_dataset("images", shape, dtype="uint8", chunks=(1, SIDE, SIDE))
        for number in range(shape[0]):
            pictures[number] = numpy.array(image(number))[..., 0]
        file["labels"] = numpy.arange(shape[0]) % CLASSES


def lmdb_pictures(directory: Path, files: int) -> None:
    """An LMDB environment with a picture under each number, as LSUN and many others have them."""
    import lmdb

    with (
        lmdb.open(str(directory / "train.lmdb"), map_size=1 << 34) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number, picture, label in records(files):
            transaction.put(f"{number:08}".encode(), label.to_bytes(4, "little") + picture)
        transaction.put(b"length", str(3 * files).encode())
    (directory / "train.lmdb" / "lock.mdb").unlink(missing_ok=True)


def _table(files: int) -> dict[str, list[object]]:
    rows = list(records(files))
    return {"image": [{"bytes": picture, "path": None} for _, picture, _ in rows], "label": [row[2] for row in rows]}


def arrow(directory: Path, files: int) -> None:
    """What save_to_disk of Hugging Face datasets writes."""
    from datasets import Dataset, Features, Image, Value

    dataset = Dataset.from_dict(_table(files), features=Features({"image": Image(), "label": Value("int64")}))
    dataset.save_to_disk(directory / "train", num_shards=4)


def parquet(directory: Path, files: int) -> None:
    """Files of Parquet with pictures in them, as they are on the Hugging Face Hub."""
    from datasets import Dataset, Features, Image, Value

    dataset = Dataset.from_dict(_table(files), features=Features({"image": Image(), "label": Value("int64")}))
    for number in range(SHARDS):
        dataset.shard(SHARDS, number).to_parquet(directory / f"train-{number:05}-of-{SHARDS:05}.parquet")


def webdataset(directory: Path, files: int) -> None:
    """Tar files with a .jpg and a .cls for each sample."""
    rows = list(records(files))
    for shard in range(SHARDS):
        with tarfile.open(directory / f"train-{shard:06}.tar", "w") as tar:
            for number, picture, label in rows[shard::SHARDS]:
                for ending, data in (("jpg", picture), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:08}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def mds(directory: Path, files: int) -> None:
    """Shards of mosaicml-streaming."""
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(directory / "train"), columns=columns, size_limit=1 << 23) as writer:
        for _, picture, label in records(files):
            writer.write({"image": picture, "label": label})


def tfrecord(directory: Path, files: int) -> None:
    """Files of TensorFlow's records, each an Example with a picture and a class."""
    import tensorflow as tf

    rows = list(records(files))
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(directory / f"train-{shard:05}-of-{SHARDS:05}.tfrecord")) as writer:
            for _, picture, label in rows[shard::SHARDS]:
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[picture])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def array_record(directory: Path, files: int) -> None:
    """Files of ArrayRecord, one record for each picture."""
    from array_record.python.array_record_module import ArrayRecordWriter

    rows = list(records(files))
    for shard in range(SHARDS):
        path = directory / f"train-{shard:05}-of-{SHARDS:05}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for _, picture, label in rows[shard::SHARDS]:
            writer.write(label.to_bytes(4, "little") + picture)
        writer.close()


KINDS: dict[str, Callable[[Path, int], None]] = {
    "folders": image_folders,
    "identified": identified_images,
    "arrays": array_folders,
    "tokens": tokens,
    "checkpoint": checkpoint,
    "safetensors": safe_checkpoint,
    "hdf5": hdf5,
    "lmdb": lmdb_pictures,
    "arrow": arrow,
    "parquet": parquet,
    "webdataset": webdataset,
    "mds": mds,
    "tfrecord": tfrecord,
    "array-record": array_record,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", type=int, default=500)
    options = parser.parse_args()
    options.directory.mkdir(parents=True)
    KINDS[options.kind](options.directory, options.files)


if __name__ == "__main__":
    main()
