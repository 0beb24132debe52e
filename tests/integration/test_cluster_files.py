"""The launch files: what can be tried without Kubernetes, Slurm and a second machine."""

import os
import shlex
import socket
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from harness import RECIPE, VERIFIER, rows

from kitae.config.recipe import load_config

FILES = Path(__file__).parents[2] / "examples" / "cluster"


def test_scripts_are_bash_and_say_how_they_are_used() -> None:
    for script in ("vms.sh", "slurm.sh"):
        subprocess.run(["bash", "-n", str(FILES / script)], check=True)
    command, environment = ["bash", str(FILES / "vms.sh")], {**os.environ, "RAY_AUTH_MODE": "disabled"}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 2 and "usage: " in ended.stderr


def test_the_job_of_kubernetes_fits_together() -> None:
    """Its settings exist, and each pool finds machines with its labels and enough of everything."""
    job = yaml.safe_load((FILES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, command, _, *settings = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("kitae", "train")
    config = load_config(RECIPE, settings)
    cluster = config.cluster
    groups = {g["rayStartParams"]["labels"]: g for g in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    counts = {"trainer": cluster.ranks, "engines": config.engine_processes, "verifiers": cluster.verifiers}
    for name, pool in cluster.pools.items():
        group = groups.pop(",".join(f"{key}={value}" for key, value in pool.labels.items()))
        has = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert float(has["cpu"]) * group["replicas"] >= pool.cpus * counts[name]
        assert float(has.get("nvidia.com/gpu", 0)) * group["replicas"] >= (pool.gpus or 0) * counts[name]
    assert not groups and cluster.pools.keys() == counts.keys()


SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slurm_with_a_stand_in_for_it(tmp_path: Path) -> None:
    """Two nodes on this machine: the script starts both, the run uses both, and nothing is left."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    programs = {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho first\necho second\n",
        "hostname": "#!/bin/bash\necho 127.0.0.2\n",
        "kitae": f'#!/bin/bash\nexec {sys.executable} -c "from kitae.cli.main import run; run()" "$@"\n',
        "ray": f'#!/bin/bash\nexec {sys.executable} -m ray.scripts.scripts "$@" --num-cpus=2\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    folder = Path("/tmp") / f"kitae-slurm-{os.getpid()}"  # names of sockets must be short
    folder.mkdir()
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(FILES.parents[1]),
        "SLURM_JOB_NODELIST": "first,second",
        "SLURM_JOB_NUM_NODES": "2",
        "PORT": str(port),
        "RAY_TMPDIR": str(folder),
    }
    placed = ["engine.count=1", "cluster.pools.engines={ place = 'strict-spread' }", "eval.prompts=0"]
    settings = [VERIFIER, f"run.dir={tmp_path}", "training.steps=2", *placed]
    ended = subprocess.run(
        ["bash", str(FILES / "slurm.sh"), str(RECIPE), *settings],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(rows(tmp_path / "toy-001")) == 2
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(p)]
    assert not left
    subprocess.run(["rm", "-r", str(folder)], check=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
