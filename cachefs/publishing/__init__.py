"""Publishes the sample order of a training process to the daemon.

The training process uses `sampler`, `publication` and `channel`: it starts a helper process and sends it messages
without ever waiting. The helper process (`helper`) resolves paths to mounts and datasets (`mount_resolver`), turns
orders of samples into orders of files (`published_consumer`, `files.shares`), and calls the daemon (`reporter`). gRPC,
which does not survive a fork, is therefore never loaded where a DataLoader forks.

Public entry points: `cachefs.publish` and `cachefs.PublishedSampler`; cachefs.hooks also uses the modules of the
training process. Modules that the training process imports need only the standard library and numpy, so that `cachefs
run` works for interpreters in which cachefs is not installed. This package may import modules of `cachefs` itself and
cachefs.planning, but neither cachefs.mount nor cachefs.hooks.
"""
