"""What administrators ask for: warm, pin, limit, evict, list and verify what is cached of a dataset.

May import fetch, datasets and store; knows no jobs and no mounts.
"""
