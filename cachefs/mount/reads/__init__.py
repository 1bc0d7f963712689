"""The reads of a mount: from a request of the kernel to the bytes of the answer.

`operations` answers the kernel. Bytes come from `block_reader`, which reads the node's tiers and asks the daemon for
missing blocks through `fetch_channel`. `read_records` and `reading_processes` record which blocks and files are read,
and by which processes. A worker is the only process that answers reads.
"""
