"""What any part of the daemon may use: threads, the log of failures, and saving state again and again.

Imports no other package of the daemon.
"""
