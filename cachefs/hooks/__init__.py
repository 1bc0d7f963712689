"""What `cachefs run` puts into a Python process that it starts.

`startup/sitecustomize.py` is found by every interpreter through PYTHONPATH. It waits for torch's DataLoader to be
imported; then `loader` watches loaders begin epochs, `order` finds out what a sampler is going to say, `opened` sees
which files samples are. None of it changes what the job computes: no random number is drawn, no sampler advanced.
"""
