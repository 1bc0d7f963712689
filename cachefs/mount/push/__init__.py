"""The pusher: a process beside a mount's workers that fills the page cache with the blocks that readers will read next.

The daemon knows the order of reads, and commands which blocks to store and drop; the pusher executes the commands. The
kernel may make a store wait for a page that a reader has locked, and only the answer to that reader's request unlocks
the page. The pusher is therefore a separate process, and shares no lock with a process that answers requests. It uses
plain threads and no event loop, since all its work is system calls.

Its entry point is `cachefs.mount.push.pusher.run_pusher`, which the mount's supervisor calls in a fork: no Python has
to start. numpy is imported with the first order, since it takes 0.1 s of a processor and most mounts get no order.
Where the import fails by then, as after an update of the environment, the pusher logs it once and takes no further
orders.
"""
