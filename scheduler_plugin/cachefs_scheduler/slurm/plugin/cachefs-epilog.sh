#!/bin/sh
# Slurm's Epilog, an example: unmounts what cachefs-prolog.sh has mounted, once no job uses it, and ends the job in cachefs.
#
# It ends with 0 whatever happens: an Epilog that fails takes the node out of service.

PATH=/opt/cachefs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
: "${CACHEFS_MOUNTS:=/cachefs}"
: "${CACHEFS_USERS:=/run/cachefs-slurm}"
export PATH

say() { logger -t cachefs-epilog "job $SLURM_JOB_ID: $*" 2>/dev/null || echo "job $SLURM_JOB_ID: $*" >&2; }

[ -n "$SLURM_JOB_ID" ] || exit 0

# The daemon sees by itself when the processes of a job are gone; this is for those that Slurm could not end.
timeout 20 cachectl job cancel "slurm-$SLURM_JOB_ID" > /dev/null 2>&1

for mark in "$CACHEFS_USERS"/*/"$SLURM_JOB_ID"; do
    [ -e "$mark" ] || continue
    users=$(dirname "$mark")
    name=$(basename "$users")
    (
        flock -w 60 9 || say "another Prolog or Epilog holds the lock"
        rm -f "$mark"
        rmdir "$users" 2>/dev/null || exit 0    # another job uses it
        mountpoint -q "$CACHEFS_MOUNTS/$name" || exit 0
        # Somebody who logged in may be in it: then it stays, and the Epilog of the next job with it tries again.
        said=$(timeout 30 cachectl umount "$CACHEFS_MOUNTS/$name" 2>&1) || say "$said"
    ) 9> "$CACHEFS_USERS/.lock"
done
exit 0
