"""The child's side of `fact_child`: `python -m cachefs_tools.doctor.child_main MODULE` gathers facts and prints them.

It reads its argument as JSON from stdin. The parent may end, or kill this process, at any time.
"""

import importlib
import logging
import os
import sys

import msgspec


def main() -> None:
    logging.disable()  # keep log lines out of the answer
    argument = msgspec.json.decode(sys.stdin.buffer.read())
    facts = importlib.import_module(f"cachefs_tools.doctor.{sys.argv[1]}").gather(argument)
    with os.fdopen(1, "wb") as out:
        out.write(msgspec.json.encode(facts))
    # A thread that hangs in the kernel keeps the process's descriptors open.
    os.close(2)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
