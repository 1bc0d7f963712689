"""Requests to one server: how many at once, how many per second, when one is sent twice, and how large they are.

`concurrency`, `request_rate`, `recent_times`, `hedging` and `throughput_fit` are independent of each other.
"""
