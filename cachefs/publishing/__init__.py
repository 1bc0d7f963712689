"""How a training process tells the daemon what it is going to read.

The training process uses `sampler`, `publication` and `channel`: it starts a helper process, sends it messages, and
never waits. The helper process (`helper`) finds out where paths lie (`places`), turns orders of samples into orders of
files (`published_consumer`, `shares`), and talks to the daemon (`reporter`). So gRPC, which does not survive a fork, is
never loaded where a DataLoader forks.

Doors: `cachefs.publish` and `cachefs.PublishedSampler`, and for cachefs.hooks the modules of the training process. What
the training process imports needs the standard library and numpy only, so that `cachefs run` works for interpreters in
which cachefs is not installed. This package may import modules of `cachefs` itself and cachefs.planning, and neither
cachefs.mount nor cachefs.hooks.
"""
