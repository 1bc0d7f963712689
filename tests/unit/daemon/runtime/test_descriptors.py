import subprocess
import sys


def test_the_soft_limit_becomes_the_hard_one() -> None:
    script = (
        "import resource\n"
        "from cachefs_daemon.runtime import descriptors\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "assert descriptors.limit() == 64\n"
        "descriptors.raise_limit()\n"
        "assert descriptors.limit() == min(hard, descriptors.ENOUGH)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
