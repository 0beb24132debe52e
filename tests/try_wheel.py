"""Kitae as it was installed from a wheel, used from an empty folder: `python try_wheel.py BIN`, run by `make wheel`.

Prints each command and what it took; the first that fails ends it. Nothing of the clone can be imported here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

TINY = ["model.path=tiny", "training.steps=2", "eval.prompts=4"]
COMMANDS = [
    ["--help"],
    ["doctor"],
    ["recipes"],
    ["algorithms"],
    ["verifiers"],
    ["environments"],
    ["suites"],
    ["train", "quickstart", *TINY, "--dry-run"],
    ["train", "quickstart", *TINY],
    ["resume", "runs/quickstart-001", "training.steps=3"],
    ["eval", "runs/quickstart-001", "eval.prompts=4"],
    ["show", "runs/quickstart-001"],
    ["diagnose", "runs/quickstart-001"],
    ["plot", "runs/quickstart-001"],
    ["report", "runs/quickstart-001"],
    ["replay", "runs/quickstart-001", "--step", "1"],
    ["export", "runs/quickstart-001", "out"],
    ["runs"],
]
KERNELS = "from kitae.kernels.cpu import packed; from kitae.kernels.devices import decoding_kernels; import torch; \
print('compiled kernels:', decoding_kernels(torch.device('cpu'), torch.float32, 64) is not None)"


def main() -> None:
    programs = Path(sys.argv[1]).resolve()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for command in COMMANDS:
        began = time.monotonic()
        done = subprocess.run(
            [programs / "kitae", *command], check=False, env=environment, capture_output=True, text=True
        )
        print(f"{time.monotonic() - began:6.1f} s  kitae {' '.join(command)}", flush=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}status {done.returncode}")
    subprocess.run([programs / "python", "-c", KERNELS], env=environment, check=True)


if __name__ == "__main__":
    main()
