"""`make fuzz N=10000`: look for wrong partitioned programs for longer than `make test` does, on all cores.

Runs `tests/test_fuzz.py` again and again, with other seeds each time. A failure is printed at once, with the
smallest program found and the command that finds it again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

AT_ONCE = 200  # splits that one process tries
_COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_fuzz.py"]


def _tried(seed: int) -> tuple[int, str]:
    """Try some splits in a process of its own; return its seed, and what it says if one is wrong."""
    done = subprocess.run(_COMMAND, env=os.environ | _settings(seed), capture_output=True, text=True)
    return seed, "" if done.returncode == 0 else done.stdout + done.stderr


def _settings(seed: int) -> dict[str, str]:
    return {"AUTOSHARD_FUZZ": str(AT_ONCE), "AUTOSHARD_FUZZ_SEED": str(seed)}


def main() -> int:
    """Run the search; return 1 if it found something."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("examples", type=int, help="splits of programs in all")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="by default another one every time"
    )
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    rounds = -(-options.examples // AT_ONCE)
    print(f"{rounds * AT_ONCE} splits on {cores} cores, seed {options.seed}", flush=True)
    failed = 0
    with ThreadPoolExecutor(cores) as pool:
        jobs = [pool.submit(_tried, options.seed + 1000 * i) for i in range(rounds)]
        try:
            for number, job in enumerate(as_completed(jobs), start=1):
                seed, report = job.result()
                if report:
                    failed += 1
                    found = " ".join(f"{k}={v}" for k, v in _settings(seed).items())
                    print(f"{report}\nfound by {found} pytest tests/test_fuzz.py", flush=True)
                print(f"{number * AT_ONCE} tried, {failed} failures", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
