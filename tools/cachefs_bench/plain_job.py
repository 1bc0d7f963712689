"""A training job without torch.

Threads read one batch each, a bounded number of batches ahead. The order of an epoch is a permutation drawn by
`numpy.random.RandomState(seed + epoch)`. The job starts when it receives a line on standard input.
"""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy

from cachefs_bench.job_samples import list_samples, parse_arguments, read_sample
from cachefs_tools.training_loop import TrainingBatch, train


def main() -> None:
    options = parse_arguments()
    paths = [path for path, _ in list_samples(options.data)]
    pool = ThreadPoolExecutor(max(1, options.workers))

    def read_batch(numbers: list[int]) -> TrainingBatch:
        reads = [read_sample(paths[number], number, options.keep_pages) for number in numbers]
        begins, seconds, right = zip(*reads, strict=True)
        return TrainingBatch(begins, seconds, len(right) - sum(right))

    def load(epoch: int) -> Iterator[TrainingBatch]:
        order = numpy.random.RandomState(options.seed + epoch).permutation(len(paths)).tolist()
        ahead: deque[Future[TrainingBatch]] = deque()
        for start in range(0, len(order), options.batch_size):
            ahead.append(pool.submit(read_batch, order[start : start + options.batch_size]))
            if len(ahead) == max(1, options.workers * options.prefetch):
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    sys.stdin.readline()
    train(load, options)
    pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
