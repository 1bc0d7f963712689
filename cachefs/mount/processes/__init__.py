"""The processes of a mount: the supervisor and those that it forks, and how a mount begins and ends.

`supervisor` runs the mount: it registers with the daemon (`registration`), mounts (`session`), keeps workers, guard,
pusher and control process running (`worker_pool`, `worker`, `control_process`), and unmounts (`shutdown`). The pusher's
own code is `cachefs.mount.push`.
"""
