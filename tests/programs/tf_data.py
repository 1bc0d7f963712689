"""tf.data over pictures (files) or over TFRecord files (--records), shuffled, mapped in parallel, and prefetched."""

import glob

import tensorflow as tf
from measuring import Measurement, arguments


def from_files(options):
    paths = sorted(glob.glob(f"{options.data}/train/*/*.jpg"))
    dataset = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=options.seed)
    return dataset.map(lambda path: tf.io.decode_jpeg(tf.io.read_file(path)), num_parallel_calls=options.workers)


def from_records(options):
    def parsed(record):
        features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
        return tf.io.decode_jpeg(tf.io.parse_single_example(record, features)["image"], channels=3)

    shards = tf.data.Dataset.list_files(f"{options.data}/*.tfrecord", shuffle=True, seed=options.seed)
    dataset = shards.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2, deterministic=True)
    return dataset.shuffle(100, seed=options.seed).map(parsed, num_parallel_calls=options.workers)


def main():
    options = arguments(records=False)
    tf.random.set_seed(options.seed)
    dataset = from_records(options) if options.records else from_files(options)
    dataset = dataset.batch(options.batch_size).prefetch(tf.data.AUTOTUNE)
    measured = Measurement(options)
    for _ in measured.epochs():
        for images in measured.waited(dataset):
            measured.saw(images)
            measured.compute(len(images))
    measured.finish()


if __name__ == "__main__":
    main()
