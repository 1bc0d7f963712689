"""The pusher: a process beside a mount's workers that fills the page cache with what readers will read next.

The daemon knows the order and says what to store and what to drop; the pusher does it. It is a process of its own and
shares no lock with whoever answers requests, because the kernel may make a store wait for a page that a reader has
locked, and that page is filled by an answer. Plain threads, no event loop: all it does are system calls.
"""
