"""The one thing setup.cfg cannot say: the optional C piece behind zero-open.

It needs a compiler and libfuse3's headers. Where either is missing the build goes on without it and the mount says
so at start and runs slower.
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
        )
    ]
)
