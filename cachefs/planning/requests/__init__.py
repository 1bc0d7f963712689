"""Requests to one server: how many at once, how often, when one is sent twice, and how large they are.

`concurrency`, `request_rate`, `recent_times`, `hedging` and `throughput_fit` know nothing of each other.
"""
