"""The pusher: a process beside a mount's workers that fills the page cache with what readers will read next.

The daemon knows in which order readers will read, and says what to store and what to drop; the pusher does it. The
kernel may make a store wait for a page that a reader has locked, and only the answer to that reader's request unlocks
the page. So the pusher is a process of its own, and shares no lock with a process that answers requests. It uses plain
threads and no event loop, since all that it does are system calls.

Its door is `cachefs.mount.push.process.push`, which the mount's supervisor calls in a fork: no Python has to start.
numpy is imported with the first order, since it takes 0.1 s of a processor and most mounts get no order. Where it can
not be imported by then, as after an update of the environment, the pusher says so once and takes no further orders.
"""
