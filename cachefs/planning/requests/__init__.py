"""Requests to one server: how many at once, how many per second, when one is sent twice, how large they are, how jobs
share them, and which of the server's addresses they take.

`request_limits`, `request_times`, `receive_window` and `shares` are independent of each other; `rails` uses
`receive_window`.
"""
