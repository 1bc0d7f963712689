"""What `cachefs run` puts into a Python process that it starts.

Its door is `startup/sitecustomize.py`, which every interpreter finds through PYTHONPATH. It waits until torch's
DataLoader is imported. Then `loader` sees loaders begin epochs and draw batches; `order` foresees which order a sampler
is going to give, `held` reads what its iterator already has, and `watch` publishes that; `opened` sees which files
samples are.

The hooks observe. They never run code of the job a second time, never draw from its generators, never replace its
objects, never raise, keep none of its descriptors, and change no environment variable but their own
(`tests/node/equivalence/` holds them to it). This package may import cachefs.publishing, and not cachefs.mount.
"""
