"""Where the processes of a job listen."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from jobs import ENVIRONMENT, SCRIPTS, command, needs_mpi

from distconv.place.addresses import INTERFACE_VARIABLES, is_loopback, is_on_one_machine, loopback_variables

NOT_SET = {name: value for name, value in ENVIRONMENT.items() if name not in INTERFACE_VARIABLES}

others = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]


def addresses(way: str, *arguments: str, **environment: str) -> set[str]:
    done = subprocess.run(
        command(way, 2, *arguments, "--partition", "height=2", str(SCRIPTS / "listening.py"), fresh=True),
        env={**NOT_SET, "MARK_OF_THE_TEST": f"{way}{arguments}", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--backend", "mpi"), marks=needs_mpi)], ids=lambda each: each[-1] if each else ""
)
def test_no_other_machine_can_reach_a_job_that_is_on_this_one(arguments: tuple[str, ...]) -> None:
    assert addresses("alone", *arguments) == {"127.0.0.1"}


@needs_mpi
def test_under_mpiexec_the_store_is_not_at_every_address() -> None:
    assert not addresses("mpiexec") & {"0.0.0.0", "::"}


@pytest.mark.skipif(not others, reason="there is no network interface but the loopback")
def test_an_interface_that_the_user_names_is_used() -> None:
    assert addresses("alone", GLOO_SOCKET_IFNAME=others[0]) - {"127.0.0.1"}


def test_what_the_user_has_set_stays() -> None:
    assert "GLOO_SOCKET_IFNAME" not in loopback_variables({"GLOO_SOCKET_IFNAME": "eth7"})
    assert set(loopback_variables({})) == set(INTERFACE_VARIABLES)


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "node-1", "::")))


def test_all_ranks_on_one_machine() -> None:
    assert is_on_one_machine({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"})
    assert not is_on_one_machine({"PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"})
    assert not is_on_one_machine({"PMI_SIZE": "8"})


def test_doctor_says_who_listens_where() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distconv", "doctor", "--json"],
        env={**NOT_SET, "GLOO_SOCKET_IFNAME": "eth7"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    found = json.loads(done.stdout)
    assert found["backends"]["gloo"] == "works"
    assert found["listens"]["distconv run: Gloo"] == "eth7, as GLOO_SOCKET_IFNAME says"
    assert found["listens"]["distconv run: NCCL"].endswith(" alone")
