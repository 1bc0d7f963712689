"""Where datasets live: one class per kind of origin, and how failed requests are tried again.

May import runtime and config.
"""
