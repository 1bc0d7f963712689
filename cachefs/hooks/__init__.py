"""What `cachefs run` puts into a Python process that it starts.

Its door is `startup/sitecustomize.py`, which every interpreter finds through PYTHONPATH. It waits until torch's
DataLoader is imported. Then `loader` sees loaders begin epochs, `order` finds out which order a sampler is going to
give, and `opened` sees which files samples are. None of this changes what the job computes: no random number is drawn,
and no sampler advanced. This package may import cachefs.publishing, and not cachefs.mount.
"""
