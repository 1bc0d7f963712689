"""Requests to one server: how many at once, how many per second, when one is sent twice, how large they are, and how
jobs share them.

`request_limits`, `request_times`, `receive_window` and `shares` are independent of each other.
"""
