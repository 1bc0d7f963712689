"""What setup.cfg cannot say: the two optional C pieces.

Without a compiler, or for zero-open without libfuse3's headers, the build goes on without them: the mount says so at
start and runs slower, and shuffled orders take longer to compute (cachefs.planning.sequences.sampler).
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
            optional=True,
        ),
        Extension(
            "cachefs.planning.sequences._shuffle",
            sources=["cachefs/planning/sequences/_shuffle.c"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        ),
    ]
)
