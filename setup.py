"""What setup.cfg cannot say: the optional C pieces.

None needs more of Python than its stable ABI, so that one wheel is for this version and all later ones.

Without a compiler, or for zero-open without libfuse3's headers, the build goes on without them: the mount says so at
start and runs slower, shuffled orders take longer to compute (cachefs.planning.sequences.sampler), jobs of
`cachefs run` send an ioctl for each file that Python opens where the mount has no shield and see a child of cachefs for
a moment (cachefs/_process.c), and the daemon's threads wait more for each other (cachefs_daemon.store.batch_io).
"""

import shutil
import subprocess

from setuptools import Extension, setup


def libfuse_include_dirs() -> list[str]:
    if shutil.which("pkg-config"):
        found = subprocess.run(["pkg-config", "--cflags-only-I", "fuse3"], capture_output=True, text=True)
        if found.returncode == 0:
            return [flag.removeprefix("-I") for flag in found.stdout.split()]
    return ["/usr/include/fuse3"]


setup(
    ext_modules=[
        Extension(
            "cachefs.mount._zero_open",
            sources=["cachefs/mount/_zero_open.c"],
            include_dirs=libfuse_include_dirs(),
            libraries=["dl"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "cachefs._process",
            sources=["cachefs/_process.c"],
            # It is loaded into Pythons with any libc, and of any age, and so needs none.
            extra_compile_args=["-O2", "-fno-stack-protector", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"],
            extra_link_args=["-nostdlib"],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "cachefs.planning.sequences._shuffle",
            sources=["cachefs/planning/sequences/_shuffle.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
        Extension(
            "cachefs_daemon.store._batch_io",
            sources=["daemon/cachefs_daemon/store/_batch_io.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
    ]
)
