"""Jobs on several hosts: how these find this one, and what is said when they can't be reached."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from xpdistribute.hub import Hub
from xpdistribute.own_address import own_address

ROOT = Path(__file__).parents[2]
NOWHERE = "no-such-host.invalid"


def outer_address() -> str | None:
    """The address of this machine by which it would talk to others; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_the_address_that_the_user_gives_holds() -> None:
    assert own_address([NOWHERE], {"XPDISTRIBUTE_ADDRESS": " 10.1.2.3 "}) == ("10.1.2.3", "")


@pytest.mark.skipif(outer_address() is None, reason="this machine has no network")
def test_hosts_that_are_not_known_here_get_the_address_of_the_usual_interface(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert own_address([NOWHERE], {}, node="localhost") == (outer_address(), "")
    said = capfd.readouterr().err
    assert NOWHERE in said
    assert "set XPDISTRIBUTE_ADDRESS" in said
    # Where a scheduler knows the hosts, nothing was wrong.
    assert own_address([], {}, node="localhost") == (outer_address(), "")
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(outer_address() is None, reason="this machine has no network")
def test_an_address_that_leads_to_a_host_is_taken_before_others() -> None:
    address = outer_address()
    assert own_address([NOWHERE, "192.0.2.7"], {}, node="localhost", elsewhere="127.0.0.1") == (
        address,
        address,
    )


@pytest.mark.parametrize("hosts", [[NOWHERE], [], ["127.0.0.2"]])
def test_a_loopback_address_is_never_given_to_others(hosts: list[str]) -> None:
    with pytest.raises(
        ValueError,
        match=r"got no address of this host .* that others could reach, only 127.0.0.1; need one — set XPD",
    ):
        own_address(hosts, {}, node="localhost", elsewhere="127.0.0.1")


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)
def test_hosts_that_mpiexec_does_not_reach_are_named_with_what_to_try(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("print('here')")
    done = subprocess.run(
        # ssh itself, as it may be missing or have to ask a resolver that is slow.
        [
            sys.executable,
            "-m",
            "xpdistribute",
            "run",
            "-n",
            "2",
            "-H",
            f"{NOWHERE}:1,localhost:1",
            str(program),
        ],
        env={**os.environ, "XPDISTRIBUTE_ADDRESS": "127.0.0.1", "PRTE_MCA_plm_ssh_agent": "/bin/false"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert re.match(
        r"xpdistribute run: mpiexec ended with status \d+ before any process had started\. ", last
    ), done.stderr
    assert f"Does it reach {NOWHERE} without a password" in last
    assert f"try 'ssh {NOWHERE} {sys.executable} -V'" in last


HOST_ERROR = """
import os, sys
import strategies as xd
try:
    xd.MultiWorkerMirroredStrategy()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi]")
@pytest.mark.parametrize("elastic", [False, True])
def test_hosts_without_mpi_between_them_are_called_by_their_names(*, elastic: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]
    with Hub(2, "secret", elastic=True).start() as hub:
        processes = []
        for number in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            by_launcher = {
                "XPDISTRIBUTE_HUB": hub.address,
                "XPDISTRIBUTE_TOKEN": "secret",
                "XPDISTRIBUTE_SIZE": "2",
                "XPDISTRIBUTE_RANK": str(number),
                "OMPI_MCA_mpi_ft_enable": "1",
            }
            place = by_launcher if elastic else {"TF_CONFIG": json.dumps(task)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", HOST_ERROR],
                    env={**os.environ, **place, "XPDISTRIBUTE_HOST": f"node{number}"},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            told = [process.communicate(timeout=40)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for number, text in enumerate(told):
        assert (
            f"this is process {number} of 2, and rank 0 of 1 in MPI, which the hosts node0, node1 need"
            in text
        ), text
        assert "pid:[" not in text


AS_IF_BY_SSH = """#!/bin/sh
# ssh [options] host command: here, where only the name of the host is another
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec unshare -u sh -c "hostname $host; $*"
"""


def can_rename_host() -> bool:
    """Whether this process may give a host's name to another one."""
    try:
        done = subprocess.run(
            ["unshare", "-u", "hostname", "other"], capture_output=True, timeout=10, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi]")
@pytest.mark.skipif(not can_rename_host(), reason="may not give processes another host name (unshare -u)")
@pytest.mark.parametrize(
    ("hosts", "options", "expected"),
    [
        ("nodea:1,nodeb:3", ["-n", "4"], ["nodea", "nodeb", "nodeb", "nodeb"]),
        ("nodea,nodeb", ["-n", "4"], ["nodea"] * 2 + ["nodeb"] * 2),
        (
            "nodea:1,nodeb:2,nodec:1",
            ["-n", "3", "--elastic", "--spares", "1"],
            ["nodea", "nodeb", "nodeb", "nodec"],
        ),
    ],
)
def test_each_host_gets_as_many_ranks_as_it_has_slots(
    tmp_path: Path, hosts: str, options: list[str], expected: list[str]
) -> None:
    program, agent = tmp_path / "train.py", tmp_path / "ssh"
    program.write_text("import os\nprint(os.environ['OMPI_COMM_WORLD_RANK'], os.uname().nodename)")
    agent.write_text(AS_IF_BY_SSH)
    agent.chmod(0o700)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "xpdistribute", "run", *options, "-H", hosts, "--all-output"),
            *("--timeout", "25", str(program)),
        ],
        env={**os.environ, "XPDISTRIBUTE_ADDRESS": "127.0.0.1", "PRTE_MCA_plm_ssh_agent": str(agent)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host}" for rank, host in enumerate(expected)]
