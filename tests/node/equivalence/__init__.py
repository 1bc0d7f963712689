"""`cachefs run` changes nothing of what a job computes: each set-up of a loader runs with and without it."""
