"""Hooks that `cachefs run` puts into each Python process that it starts.

The entry point is `startup/sitecustomize.py`, which every interpreter finds through PYTHONPATH. It waits until torch's
DataLoader is imported. Then `loader` watches loaders begin epochs and draw batches; `order.foresee` foresees the order
that a sampler will give, `order.library_iterators` reads the order that its iterator already has, and `loader_watch`
publishes both; `opened_files` sees which files samples are.

The hooks observe. They never run code of the job a second time, never draw from its generators, never replace its
objects, never raise, keep none of its descriptors, and change no environment variable but their own (verified by
`tests/node/equivalence/`). This package may import cachefs.publishing, but not cachefs.mount.
"""
