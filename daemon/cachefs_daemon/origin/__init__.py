"""Origins: one class per kind of store that holds datasets, and retries of failed requests.

May import runtime and config.
"""
