"""`cachefs-bench programs`: training programs of many libraries, native, mounted, and under `cachefs run`.

Uses the lab's throttle and scratch nodes; the programs are in tests/programs and know nothing of cachefs.
"""
