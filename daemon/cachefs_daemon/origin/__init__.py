"""Origins: one class per kind of store that holds datasets, and what all of them share: deadlines, retries, limits and
health of servers, and counters of requests.

`http` is the HTTP client of our own, `s3`, `web` and `file` are the kinds. May import runtime and config.
"""
