"""The job files are well formed, and those that this machine can run do run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "examples" / "jobs"
SCRIPTS = sorted([*JOBS.glob("*.sh"), *JOBS.glob("*.sbatch")])

PROGRAM = """
from strategies import MultiWorkerMirroredStrategy, all_reduce
import sys

strategy = MultiWorkerMirroredStrategy()
total = strategy.run(lambda: all_reduce("SUM", 1.0))
if strategy.is_chief:
    print(sys.argv[1], strategy.num_workers, total, flush=True)
sys.exit(int(sys.argv[2]) if strategy.worker_id == 1 else 0)
"""

SRUN = """#!/bin/bash
# srun as far as the job file needs it: tasks of this machine with the variables that Slurm sets.
while [[ $1 == -* ]]; do shift; done
pids=()
for ((task = 0; task < 2; task++)); do
  SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 \\
    SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""


def run(script: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    venv = folder / "venv"  # where the job files look for an environment: one that is this one
    (venv / "bin").mkdir(parents=True)
    for name, command in {
        "python": f'exec "{sys.executable}" "$@"',
        "xpdistribute": f'exec "{sys.executable}" -m xpdistribute "$@"',
    }.items():
        (venv / "bin" / name).write_text(f"#!/bin/bash\n{command}\n")
        (venv / "bin" / name).chmod(0o755)
    (venv / "bin" / "activate").write_text(f'export PATH="{venv}/bin:$PATH"\n')
    (venv / "bin" / "srun").write_text(SRUN)
    (venv / "bin" / "srun").chmod(0o755)
    without_slurm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", str(JOBS / script), *arguments],
        cwd=folder,
        env={
            **without_slurm,
            "PYTHONPATH": str(ROOT),
            "VENV": str(venv),
            "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_for_bash_and_stops_at_errors(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert not checked.stderr
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.suffix == ".sbatch"], ids=lambda path: path.name)
def test_the_directives_of_sbatch_come_before_the_first_command_and_have_values(script: Path) -> None:
    lines = script.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives, script
    assert max(directives) < first  # sbatch reads no further
    options = {}
    for number in directives:
        found = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?(?:\s+#.*)?", lines[number])
        assert found, lines[number]
        options[found[1]] = found[2]
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time", "output"} <= set(options)
    assert re.fullmatch(r"\d\d:\d\d:\d\d", options["time"])


def test_tasks_of_srun_find_one_another(tmp_path: Path) -> None:
    done = run("slurm_srun.sbatch", tmp_path, "train.py", "hello", "0", XPDISTRIBUTE_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello 2 2.0\n"


def test_the_launcher_runs_in_its_script(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="xpdistribute run needs mpiexec, of the extra mpi")
    done = run("slurm_launcher.sbatch", tmp_path, "train.py", "hello", "0", SLURM_NTASKS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] hello 2 2.0\n"


@pytest.mark.parametrize("status", [0, 3])
def test_plain_mpiexec_runs_a_program_and_has_its_status(status: int, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpiexec is of the extra mpi")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("this environment has no mpiexec of its own")
    done = run("mpiexec.sh", tmp_path, "2", "train.py", "hello", str(status), MPIEXEC=str(mpiexec))
    assert done.returncode == status, done.stderr
    assert "hello 2 2.0\n" in done.stdout


@pytest.mark.parametrize("status", [0, 3])
def test_processes_find_one_another_by_tf_config(status: int, tmp_path: Path) -> None:
    done = run("tf_config.sh", tmp_path, "2", "train.py", "hello", str(status), PORT=free_port())
    assert done.returncode == status, done.stderr
    assert done.stdout == "hello 2 2.0\n"


def test_the_job_for_kubernetes_has_what_the_operator_needs() -> None:
    yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML")
    job = yaml.safe_load((JOBS / "kubernetes_mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    assert replicas["Launcher"]["replicas"] == 1
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert launcher["image"] == worker["image"]
    assert all(isinstance(word, str) for word in launcher["args"])
    assert worker["volumeMounts"] == launcher["volumeMounts"]


def test_the_arguments_of_the_job_for_kubernetes_are_those_of_the_launcher(tmp_path: Path) -> None:
    yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML")
    from xpdistribute.run_options import parse

    job = yaml.safe_load((JOBS / "kubernetes_mpijob.yaml").read_text())["spec"]
    (launcher,) = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    workers, slots = job["mpiReplicaSpecs"]["Worker"]["replicas"], job["slotsPerWorker"]
    hostfile = tmp_path / "hostfile"  # as the operator writes it
    hostfile.write_text(
        "".join(f"train-worker-{n}.train.default.svc slots={slots}\n" for n in range(workers))
    )
    program = tmp_path / "train.py"
    program.write_text("")
    where = {"/etc/mpi/hostfile": str(hostfile), "/opt/train.py": str(program)}
    options = parse([where.get(word, word) for word in launcher["args"]])
    assert options is not None
    assert options.num_processes == workers * slots
    assert [str(host) for host in options.hosts] == [
        f"train-worker-{n}.train.default.svc:{slots}" for n in range(workers)
    ]
    assert options.program[1:] == (str(program), "--checkpoint-dir", "/checkpoints", "--resume")
