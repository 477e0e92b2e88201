"""The command ``xpdistribute doctor``, run as users run it, over packages that are whole, old, broken, hanging or missing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from xpdistribute.host import find_cores, find_memory
from xpdistribute.link_probe import LinkReport, probe_links
from xpdistribute.packages import PACKAGES, State, probe

ROOT = Path(__file__).parents[2]

# As large packages take seconds to import, these stand in for them; what matters is that the command imports what is there.
WHOLE = {
    "torch": "__version__ = '2.9.0'\nclass version: cuda = None\ndef get_num_threads(): return 3\n",
    "jax": "__version__ = '0.9.0'\n",
    "jaxlib": "__version__ = '0.9.1'\n",
    "matplotlib": "__version__ = '3.10.0'\n",
    "sklearn": "__version__ = '1.7.0'\n",
    "tensorboardX": "__version__ = '2.6.4'\n",
    "cupy": "raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')\n",
    "mpi4py": "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')\n",
}
ONE_THREAD = """
def threadpool_info():
    return [{"user_api": "blas", "internal_api": "openblas", "version": "0.3.30", "num_threads": THREADS}]
"""
GPU = """
__version__ = "13.6.0"
class cuda:
    class runtime:
        @staticmethod
        def runtimeGetVersion(): return 12090
        @staticmethod
        def driverGetVersion(): return 13000
        @staticmethod
        def getDeviceCount(): return 2
        @staticmethod
        def getDeviceProperties(index): return {"name": b"GPU %d" % index, "totalGlobalMem": 80 << 30}
"""
Doctor = Callable[..., "subprocess.CompletedProcess[str]"]


def write(folder: Path, **packages: str) -> None:
    for name, code in packages.items():
        (folder / f"{name}.py").write_text(code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, **WHOLE, threadpoolctl=ONE_THREAD.replace("THREADS", "1"))
    return tmp_path


@pytest.fixture
def doctor(folder: Path) -> Doctor:
    """The command over the packages of the folder, which come before those that are installed."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "xpdistribute", "doctor", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(folder), **environment},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run


def told(doctor: Doctor, *arguments: str, **environment: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(doctor("--json", *arguments, **environment).stdout)
    return report


def test_the_report_names_the_machine_and_every_package_in_plain_text_where_it_is_piped(
    doctor: Doctor,
) -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"cores {os.cpu_count()} logical, {find_cores().usable} for this process" in lines[:10]
    assert "BLAS openblas 0.3.30, 1 thread(s)" in lines
    assert "torch 2.9.0 ok PyTorch models 3 threads" in lines
    assert "jax 0.9.0 ok JAX models jaxlib 0.9.1" in lines
    assert "mpi4py missing several processes and hosts" in lines
    assert "- mpi4py, for several processes and hosts: pip install 'xpdistribute[mpi]'" in lines
    for package in PACKAGES:
        assert any(line.startswith(f"{package.name} ") for line in lines)


def test_the_json_has_a_schema_number_and_the_state_version_and_command_of_every_package(
    doctor: Doctor,
) -> None:
    report = told(doctor)
    assert report["schema"] == 1
    assert report["python"].split()[0] == ".".join(map(str, sys.version_info[:3]))
    assert set(report["packages"]) == {package.name for package in PACKAGES}
    assert report["packages"]["torch"]["version"] == "2.9.0"
    assert report["packages"]["torch"]["state"] == "ok"
    assert report["packages"]["mpi4py"]["state"] == "missing"
    assert report["packages"]["mpi4py"]["install"] == "pip install 'xpdistribute[mpi]'"
    assert report["blas"] == [{"name": "openblas", "version": "0.3.30", "threads": 1, "kernels": None}]
    assert report["cores"]["available"] >= 1
    assert report["memory"]["total_bytes"] > 1 << 28
    assert report["failures"] == []


def test_in_a_terminal_it_draws_tables(folder: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "xpdistribute", "doctor"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder), "TERM": "xterm", "COLUMNS": "120"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=50) == 0
    assert "┌" in text.decode()
    assert "This machine" in text.decode()


BROKEN = {
    "raises": (
        "raise RuntimeError('built for another NumPy\\nsecond line')",
        "RuntimeError: built for another NumPy",
    ),
    "exits": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "ends": ("import os; os._exit(7)", "the import ended the process with status 7"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the import crashed with SIGSEGV"),
    "aborts": (
        "import os, sys; print('illegal instruction set', file=sys.stderr, flush=True); os.abort()",
        "the import crashed with SIGABRT: illegal instruction set",
    ),
    "needs": ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
    "mumbles": (
        "class E(Exception):\n  def __str__(self): raise ValueError\nraise E()",
        "E",
    ),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "misspells": ("def f(:", "SyntaxError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_package_that_fails_to_import_in_any_way_is_broken_and_the_report_says_how(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, words = BROKEN[kind]
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("torch", timeout=30)
    assert found.state is State.BROKEN
    assert words in str(found.problem)
    assert "\n" not in str(found.problem)


def test_a_package_that_hangs_with_a_child_of_its_own_is_ended_with_it_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax.py").write_text(
        textwrap.dedent(
            f"""
            import fcntl, subprocess, sys, time
            lock = open({str(tmp_path / "lock")!r}, "w")
            fcntl.flock(lock, fcntl.LOCK_EX)  # the child holds it too, until both are gone
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], pass_fds=[lock.fileno()])
            time.sleep(100)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("jax", timeout=1.5)
    assert found.state is State.BROKEN
    assert found.problem == "the import did not end within 1.5 s"
    with open(tmp_path / "lock") as lock:
        deadline = time.monotonic() + 10
        while not _is_free(lock) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _is_free(lock)


def test_what_a_package_prints_and_how_it_ends_the_process_later_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "import atexit, os\n__version__ = '3.9.1'\nprint('{\"state\": \"broken\"}', flush=True)\nos.write(1, b'half a line')\n"
        "atexit.register(os._exit, 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("matplotlib", timeout=30)
    assert (found.state, found.version, found.problem) == (State.OK, "3.9.1", None)


@pytest.mark.slow
def test_the_command_survives_broken_packages_and_warns_of_each(doctor: Doctor, folder: Path) -> None:
    write(
        folder,
        torch=BROKEN["crashes"][0],
        jax="import time; time.sleep(100)",
        mpi4py=BROKEN["raises"][0],
        tensorboardX=BROKEN["ends"][0],
    )
    done = doctor("--timeout", "6")
    assert done.returncode == 0, done.stderr
    assert "torch is broken: the import crashed with SIGSEGV" in done.stdout
    assert "jax is broken: the import did not end within 6 s" in done.stdout
    assert "mpi4py is broken: RuntimeError: built for another NumPy" in done.stdout
    assert "tensorboardX is broken: the import ended the process with status 7" in done.stdout


def test_a_broken_numpy_and_rich_are_reported_and_make_the_command_fail(doctor: Doctor, folder: Path) -> None:
    write(folder, numpy="raise ImportError('libopenblas.so: cannot open shared object file')", rich="1 / 0")
    done = doctor()
    assert done.returncode == 1
    assert "numpy is needed always, and is broken: ImportError: libopenblas.so" in done.stderr
    assert "rich is needed always, and is broken: ZeroDivisionError" in done.stderr
    assert "strategies is needed always, and is broken" in done.stderr
    assert "This machine" in done.stdout


def test_a_module_that_hides_one_of_our_packages_is_named(doctor: Doctor, folder: Path) -> None:
    (folder / "variables.py").write_text("learning_rate = 0.1\n")
    done = doctor()
    assert done.returncode == 1
    assert f"{folder / 'variables.py'} hides our package 'variables'" in done.stderr


def test_required_things_that_are_missing_are_named_with_what_to_do_and_the_status_is_1(
    doctor: Doctor, folder: Path
) -> None:
    write(folder, torch="raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = doctor("--require", "mpi,gpu", "--require", "torch,jax", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["required"] == ["mpi", "gpu", "torch", "jax"]
    assert done.stderr.splitlines() == [
        "xpdistribute doctor: --require mpi: mpi4py is not installed — pip install 'xpdistribute[mpi]'",
        "xpdistribute doctor: --require gpu: cupy is not installed — pip install 'xpdistribute[cuda12]'",
        "xpdistribute doctor: --require torch: torch is not installed — pip install 'xpdistribute[torch]'",
    ]


def test_required_things_that_are_there_give_the_status_0(doctor: Doctor) -> None:
    done = doctor("--require", "torch,jax,plot,demo,tensorboard,numpy")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_requirement_that_is_none_is_wrong_usage(doctor: Doctor) -> None:
    done = doctor("--require", "gpus")
    assert done.returncode == 2
    assert "got gpus; need names of numpy, gpu, nccl, mpi, torch, jax" in done.stderr


def _cupy(folder: Path, code: str, nccl: str) -> None:
    (folder / "cupy.py").unlink()
    (folder / "cupy" / "cuda").mkdir(parents=True)
    (folder / "cupy" / "__init__.py").write_text(
        "import cupy.cuda as cuda\n" + code.partition("class cuda:")[0]
    )
    (folder / "cupy" / "cuda" / "__init__.py").write_text(textwrap.dedent(code.partition("class cuda:")[2]))
    (folder / "cupy" / "cuda" / "nccl.py").write_text(nccl)


def test_gpus_are_shown_with_their_memory_and_cuda_and_nccl_with_their_versions(
    doctor: Doctor, folder: Path
) -> None:
    _cupy(folder, GPU, "def get_version(): return 22703\n")
    done = doctor("--require", "gpu,nccl", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpus"] == [{"name": "GPU 0", "bytes": 80 << 30}, {"name": "GPU 1", "bytes": 80 << 30}]
    cupy = report["packages"]["cupy"]
    assert (cupy["cuda_runtime"], cupy["cuda_driver"], cupy["nccl"]) == ("12.9", "13.0", "2.27.3")


def test_cupy_without_a_driver_is_a_warning_and_no_gpu(doctor: Doctor, folder: Path) -> None:
    code = GPU.replace(
        "def driverGetVersion(): return 13000", "def driverGetVersion(): raise OSError('no driver')"
    )
    _cupy(folder, code, "raise ImportError('libnccl.so.2: cannot open shared object file')\n")
    done = doctor("--require", "gpu")
    assert done.returncode == 1
    assert "CuPy is installed and sees no GPU: OSError: no driver" in done.stdout
    assert (
        "--require gpu: CuPy sees no GPU (OSError: no driver) — run it where nvidia-smi shows a GPU"
        in done.stderr
    )


def test_two_gpus_without_nccl_are_a_warning_and_fail_where_nccl_is_required(
    doctor: Doctor, folder: Path
) -> None:
    _cupy(folder, GPU, "raise ImportError('libnccl.so.2: cannot open shared object file')\n")
    done = doctor("--require", "nccl")
    assert done.returncode == 1
    assert "there are 2 GPUs, and CuPy loads no NCCL: ImportError: libnccl.so.2" in done.stdout
    assert "--require nccl: CuPy loads no NCCL" in done.stderr


def test_mpi_needs_its_package_its_library_and_its_launcher(doctor: Doctor, folder: Path) -> None:
    (folder / "mpi4py.py").unlink()
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").write_text(
        "__version__ = '4.1.0'\nclass rc: initialize = finalize = True\n"
    )
    library = folder / "mpi4py" / "MPI.py"

    library.write_text("raise RuntimeError('cannot load MPI library')")
    done = doctor("--require", "mpi", PATH="")
    assert done.returncode == 1
    assert "mpi4py loads no MPI library (RuntimeError: cannot load MPI library)" in done.stderr

    library.write_text(
        "import mpi4py\nassert not mpi4py.rc.initialize\n"
        "def Get_library_version(): return 'Open MPI v5.0.8, package: x\\nmore\\0'\n"
    )
    done = doctor("--require", "mpi", PATH="")
    if not (Path(sys.executable).parent / "mpiexec").exists():  # xpdistribute[mpi] brings one
        assert done.returncode == 1
        assert "--require mpi: there is no mpiexec" in done.stderr
    assert "Open MPI v5.0.8" in done.stdout

    (folder / "mpiexec").write_text("#!/bin/sh\n")
    (folder / "mpiexec").chmod(0o755)
    done = doctor("--require", "mpi", PATH=str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(folder / "mpiexec") in done.stdout


def test_many_blas_threads_are_a_warning_that_names_the_variable_to_set(doctor: Doctor, folder: Path) -> None:
    (folder / "threadpoolctl.py").write_text(ONE_THREAD.replace("THREADS", "4096"))
    (warning,) = [w for w in told(doctor)["warnings"] if "BLAS" in w]
    cores = find_cores().available
    assert warning == (
        f"BLAS (openblas) uses 4096 threads, and there are {cores} cores: set OPENBLAS_NUM_THREADS={cores} or less before "
        "Python starts"
    )


def test_without_threadpoolctl_the_environment_tells_the_threads_or_nothing_does(
    doctor: Doctor, folder: Path
) -> None:
    write(folder, threadpoolctl="raise ModuleNotFoundError('no', name='threadpoolctl')")
    unset = {"OPENBLAS_NUM_THREADS": "", "OMP_NUM_THREADS": "", "MKL_NUM_THREADS": ""}
    assert any(
        "is not known, one for each core if nothing is set: set " in warning
        for warning in told(doctor, **unset)["warnings"]
    )
    one = dict.fromkeys(unset, "1")
    assert not any("is not known" in warning for warning in told(doctor, **one)["warnings"])


def test_a_container_that_grants_less_than_the_machine_has_is_seen_in_both_versions_of_cgroups(
    tmp_path: Path,
) -> None:
    second, first = tmp_path / "second", tmp_path / "first"
    own = second / "sys/fs/cgroup/jobs/mine"
    _write(second / "proc/self/cgroup", "0::/jobs/mine\n")
    _write(own / "cpu.max", "max 100000\n")
    _write(own.parent / "cpu.max", "150000 100000\n")
    _write(own / "memory.max", "1073741824\n")
    _write(own.parent / "memory.max", "max\n")
    _write(second / "proc/meminfo", "MemTotal:       4194304 kB\nMemAvailable:   2097152 kB\n")
    cores, memory = find_cores(second), find_memory(second)
    assert (cores.limit, cores.available) == (1.5, 1)
    assert (memory.total, memory.free, memory.limit) == (4 << 30, 2 << 30, 1 << 30)

    # The path is the host's, and leads to nowhere in the container.
    _write(first / "proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    _write(first / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    _write(first / "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    _write(first / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert (find_cores(first).limit, find_cores(first).available) == (0.5, 1)
    assert find_memory(first).limit is None


def test_where_the_system_says_nothing_there_is_no_limit(tmp_path: Path) -> None:
    assert find_cores(tmp_path).limit is None
    assert find_memory(tmp_path).limit is None


def test_a_version_below_the_least_that_we_ask_for_is_too_old(doctor: Doctor, folder: Path) -> None:
    _install(folder, "xpdistribute", "Requires-Dist: torch>=2.4; extra == 'torch'\n")
    write(folder, torch=WHOLE["torch"].replace("2.9.0", "2.3.1+cpu"))
    done = doctor("--require", "torch")
    assert done.returncode == 1
    assert "torch is too old: version 2.3.1+cpu; need 2.4 or later" in done.stdout
    write(folder, torch=WHOLE["torch"].replace("2.9.0", "2.10.0"))
    assert doctor("--require", "torch").returncode == 0


def test_two_builds_of_cupy_are_a_warning(doctor: Doctor, folder: Path) -> None:
    _install(folder, "cupy-cuda12x")
    _install(folder, "cupy-cuda13x")
    (warning,) = [w for w in told(doctor)["warnings"] if "CuPy" in w]
    assert "installed 2 times (cupy-cuda12x, cupy-cuda13x)" in warning


def test_the_command_loads_neither_numpy_nor_the_library_nor_rich() -> None:
    code = "import xpdistribute.command_line, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert not {"numpy", "strategies", "collectives", "variables", "rich", "optree"} & set(
        done.stdout.split()
    )


def test_the_extras_and_packages_that_it_speaks_of_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for package in PACKAGES:
        if package.extra is not None:
            asked = " ".join(extras[package.extra])
            assert any(name in asked for name in package.distributions or (package.name,)), package
    assert project["scripts"] == {"xpdistribute": "xpdistribute.command_line:main"}


def test_bench_is_the_benchmark_suite(tmp_path: Path) -> None:
    def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        # By way of its function, as the installed command does: the current folder is not on the path then.
        code = "import sys; from xpdistribute.command_line import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, "-P", "-c", code, "bench", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    done = bench("broadcast", "--quick", "-e", "4K", folder=tmp_path / "nothing")
    assert done.returncode == 0, done.stderr
    assert "broadcast" in done.stdout
    assert "1 thread(s)" in done.stdout  # BLAS's, set before NumPy was loaded
    assert bench("no_such_benchmark", folder=tmp_path / "nothing").returncode == 2

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__main__.py").write_text("print('not ours')\n")
    done = bench(folder=tmp_path)
    assert done.returncode == 1
    assert "hides our package 'benchmarks'" in done.stderr


def _is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _install(folder: Path, name: str, more: str = "") -> None:
    """What pip leaves of a distribution."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n{more}"
    _write(folder / f"{name.replace('-', '_')}-9.0.dist-info" / "METADATA", text)


def test_the_ranks_of_this_machine_are_checked_on_request() -> None:
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [sys.executable, "-m", "xpdistribute", "doctor", "--json", "--mpi"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    links = json.loads(done.stdout)["links"]
    assert links["failures"] == []
    assert links["ranks"] >= 2
    assert "mpiexec" in links["mpiexec"]
    for told in links["all_reduce"].values():
        assert list(told["seconds"]) == ["4", "1048576", "67108864"]
        assert all(0 < seconds < 10 for seconds in told["seconds"].values())
    assert set(links["all_reduce"]) == {"shared_memory", "mpi"}
    assert links["all_reduce"]["mpi"]["library"]
    assert links["load"] >= 0


def test_ranks_that_mpi_fails_between_are_measured_in_shared_memory_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'XPDISTRIBUTE_HUB' in os.environ: sys.modules['mpi4py.MPI'] = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    links = probe_links(30.0)
    assert set(links.measured) == {"shared_memory"}
    (failure,) = links.failures
    assert "ranks by MPI: status 1" in failure


def test_a_machine_that_was_busy_before_the_ranks_were_timed_is_told() -> None:
    seconds = {"shared_memory": {"seconds": {"4": 9e-6}}}
    cores = find_cores().logical
    busy = LinkReport(2, "mpiexec", seconds, load=cores + 1.25)
    assert busy.lines()[-1].startswith(
        f"the machine was busy before (a load of {cores + 1.25:.1f} on {cores} cores)"
    )
    for load in (0.0, None):
        assert "busy" not in " ".join(LinkReport(1, "mpiexec", seconds, load=load).lines())
