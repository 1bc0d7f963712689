#!/bin/sh
# Slurm's Prolog, an example: mounts the dataset that a job names, and begins to bring it here.
#
# In slurm.conf:  Prolog=/etc/slurm/cachefs-prolog.sh  Epilog=/etc/slurm/cachefs-epilog.sh
# A job:          sbatch --comment=cachefs:imagenet train.sh       # it reads /cachefs/imagenet
#
# Slurm runs it as root on each node of a job, without PATH. It ends with 0 whatever happens: a Prolog that fails takes
# the node out of service. A job whose dataset could not be mounted finds an empty directory, and the log says why.

PATH=/opt/cachefs/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
: "${CACHEFS_MOUNTS:=/cachefs}"            # a directory for each dataset
: "${CACHEFS_USERS:=/run/cachefs-slurm}"   # which job uses which of them
: "${CACHEFS_OPTIONS:=follow}"             # of mount.cachefs
export PATH

say() { logger -t cachefs-prolog "job $SLURM_JOB_ID: $*" 2>/dev/null || echo "job $SLURM_JOB_ID: $*" >&2; }

# `cachefs:NAME` somewhere in the comment, as cachefs.lua reads it. Users write it, and this is root: only what can be
# the name of a dataset goes on.
name=$(printf %s "$SLURM_JOB_COMMENT" | tr ' ;' '\n\n' | sed -n 's/^cachefs:\([A-Za-z0-9_][A-Za-z0-9._-]*\).*/\1/p' | head -n 1)
[ -n "$name" ] && [ -n "$SLURM_JOB_ID" ] || exit 0

mkdir -p "$CACHEFS_USERS" "$CACHEFS_MOUNTS/$name" || exit 0
(
    flock -w 60 9 || say "another Prolog or Epilog holds the lock"
    mkdir -p "$CACHEFS_USERS/$name"
    : > "$CACHEFS_USERS/$name/$SLURM_JOB_ID"
    mountpoint -q "$CACHEFS_MOUNTS/$name" && exit 0
    said=$(timeout 60 cachectl mount "$name" "$CACHEFS_MOUNTS/$name" -o "$CACHEFS_OPTIONS" 2>&1) || say "$said"
) 9> "$CACHEFS_USERS/.lock"

# In the background: the job starts at once, and what it reads comes first.
said=$(timeout 20 cachectl warmup "$name" --no-wait 2>&1) || say "$said"
exit 0
