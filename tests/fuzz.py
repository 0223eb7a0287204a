"""`make fuzz N=10000`: look for wrong partitioned programs for longer than `make test` does, on all cores.

Every core runs `tests/test_fuzz.py` with seeds of its own; a failure prints the smallest program found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def main() -> int:
    """Run the search; return the number of cores on which it found something."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("examples", type=int, help="programs in all")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="by default another one every time"
    )
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    share = -(-options.examples // cores)
    print(f"{options.examples} programs on {cores} cores, seed {options.seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_fuzz.py"]
    running = [
        subprocess.Popen(
            command,
            env=os.environ
            | {"AUTOSHARD_FUZZ": str(share), "AUTOSHARD_FUZZ_SEED": str(options.seed + 1_000_000 * core)},
        )
        for core in range(cores)
    ]
    try:
        failed = sum(process.wait() != 0 for process in running)
    except KeyboardInterrupt:
        for process in running:
            process.terminate()
        raise
    print("every program computes what the original does" if not failed else f"failures on {failed} cores")
    return failed


if __name__ == "__main__":
    sys.exit(main())
