"""NVIDIA DALI without a GPU: fn.readers.file and a decoder on the processor."""

import numpy
from measuring import Measurement, arguments
from nvidia.dali import fn, pipeline_def


@pipeline_def
def pictures(root):
    data, labels = fn.readers.file(file_root=root, random_shuffle=True, name="reader", initial_fill=128)
    return fn.decoders.image(data, device="cpu"), labels


def main():
    options = arguments()
    pipeline = pictures(
        root=f"{options.data}/train", batch_size=options.batch_size, num_threads=options.workers, device_id=None,
        seed=options.seed,
    )  # fmt: skip
    pipeline.build()
    steps = pipeline.epoch_size("reader") // options.batch_size
    measured = Measurement(options)
    for _ in measured.epochs():
        for _ in range(steps):
            with measured.waiting():
                images, labels = pipeline.run()
            for number in range(len(images)):
                measured.saw((numpy.array(images[number]), numpy.array(labels[number])))
            measured.compute(len(images))
    measured.finish()


if __name__ == "__main__":
    main()
