"""Processes that see what one of a container sees: a mount, Python, and the /proc of a pid namespace of their own."""

import os
import shlex
import sys
from pathlib import Path
from typing import Final

# Where the mount is in the container.
DATA: Final = Path("/data")
# What Python needs. What a machine does not have is left out.
_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")
_PYTHON: Final = (sys.base_prefix, sys.prefix, str(Path(__file__).parents[1]))


def contained(mount: Path, *, uid: int = 0, user_namespace: bool = False) -> list[str]:
    """What to put in front of a command. It has mount and pid namespaces of its own, no /dev/shm and no /run, and its
    first process is the command. *mount* is at DATA there."""
    root = "/mnt"  # of the container; nothing of the machine's /mnt is needed
    steps = [
        f"mount -t tmpfs -o mode=0755 cachefs-tests {root}",
        f"mkdir {root}{DATA} {root}/proc {root}/tmp",
        "umask 022",
    ]
    for place in dict.fromkeys((*_SYSTEM, *_PYTHON)):
        source, target = Path(place), f"{root}{place}"
        if source.is_symlink() and place in _SYSTEM:
            steps.append(f"ln -s {shlex.quote(os.readlink(source))} {target}")
        elif source.is_dir():
            steps.append(f"{{ mkdir -p {target} && mount --rbind {shlex.quote(place)} {target}; }}")
        elif source.exists():
            steps.append(f"{{ mkdir -p {Path(target).parent} && : > {target} && mount --bind {place} {target}; }}")
    steps += [
        f"mount --bind {shlex.quote(str(mount))} {root}{DATA}",
        f"chmod 1777 {root}/tmp",
        f"mount -t proc proc {root}/proc",
    ]
    become = f"setpriv --reuid={uid} --regid={uid} --clear-groups --inh-caps=-all " if uid else ""
    steps.append(f'exec chroot {root} {become}"$@"')
    spaces = ["--mount", "--pid", "--fork", "--kill-child", *(["--user", "--map-root-user"] if user_namespace else [])]
    return ["unshare", *spaces, "--propagation", "private", "sh", "-c", " && ".join(steps), "sh"]
