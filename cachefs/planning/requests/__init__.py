"""Requests to one server: how many at once, how many per second, when one is sent twice, and how large they are.

`request_limits`, `request_times` and `receive_window` are independent of each other.
"""
