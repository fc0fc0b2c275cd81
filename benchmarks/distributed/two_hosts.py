"""Two hosts on one machine: network namespaces with addresses of their own and a slow link between them.

For `benchmarks/distributed/two_machines.py`; Linux, as root, with iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MTU = 65000  # bytes of a packet: few large ones, since the relay is Python
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
LEFT = "left: "
_PREFIX = "distconv-host"
_NAMES = "127.0.0.1 localhost\n10.77.0.1 node-0\n10.77.0.2 node-1\n"


class Link:
    """Carries packets between two tunnels: `delay` seconds late, and at most `rate` bits per second each way."""

    def __init__(self, tunnels: Sequence[int], delay: float, rate: float) -> None:
        self._tunnels, self._delay, self._rate = tunnels, delay, rate
        self._cut = threading.Event()
        self._closed = threading.Event()
        self.bytes = [0, 0]
        self._threads = [threading.Thread(target=self._carry, args=(way,), daemon=True) for way in (0, 1)]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self._cut.set()

    def close(self) -> None:
        """Ends the link."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _carry(self, way: int) -> None:
        source, target = self._tunnels[way], self._tunnels[1 - way]
        waiting: deque[tuple[float, bytes]] = deque()
        free = 0.0  # when the wire has sent what came before
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not self._closed.is_set():
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    packet = waiting.popleft()[1]
                    if not self._cut.is_set():
                        with contextlib.suppress(OSError):
                            os.write(target, packet)
                if selector.select(min(0.2, max(0.0, waiting[0][0] - now)) if waiting else 0.2):
                    packet = os.read(source, MTU + 4)
                    now = time.monotonic()
                    free = max(free, now) + 8 * len(packet) / self._rate
                    self.bytes[way] += len(packet)
                    waiting.append((free + self._delay, packet))


class Host:
    """A network namespace that says that it is a machine: with a name, an address, temporary files and a cache.

    folder: where both hosts mount a file system in memory, each its own.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = f"node-{number}", f"10.77.0.{number + 1}"
        self.namespace = f"{_PREFIX}{number}-{os.getpid()}"
        self.folder = folder / self.name
        _ip("netns", "add", self.namespace)
        self._names = Path("/etc/netns", self.namespace)  # `ip netns exec` shows these files in place of those in /etc
        self._names.mkdir(parents=True)
        self._names.joinpath("hosts").write_text(_NAMES)
        self.tunnel = _tunnel(self.namespace)
        for command in (
            ("addr", "add", f"{self.address}/24", "dev", "tun0"),
            ("link", "set", "tun0", "mtu", str(MTU), "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self.namespace, *command)

    def command(self, *command: str) -> list[str]:
        """`command` as it is run on this host, which prints LEFT and a name for each temporary file that it leaves."""
        temporary, cache = self.folder / "tmp", self.folder / "cache"
        begin = f"mount -t tmpfs tmpfs {self.folder.parent} && mkdir -p {temporary} {cache} && hostname {self.name}"
        end = f"code=$?; find {temporary} -type f | sed 's/^/{LEFT}/'; exit $code"
        inside = ["sh", "-c", f'{begin} && "$@"; {end}', "sh", *command]
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", *inside]

    def environment(self) -> dict[str, str]:
        """What differs between the hosts."""
        return {
            **os.environ,
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "GLOO_SOCKET_IFNAME": "tun0",
            "UCX_NET_DEVICES": "tun0",
            "UCX_TLS": "tcp,self",  # UCX would find that the hosts share memory
            "OMP_NUM_THREADS": "1",
        }

    def processes(self) -> list[int]:
        """Those that run on it."""
        return [int(each) for each in _ip("netns", "pids", self.namespace).split()]

    def ranks(self) -> list[int]:
        """Those that are ranks of a job, or watch one: not its launcher."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"python") and b"distconv" in words and b"torch.distributed.run" not in words:
                    found.append(pid)
        return found

    def end(self) -> None:
        """Kills its processes."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Removes it, with its processes."""
        self.end()
        os.close(self.tunnel)
        _ip("netns", "del", self.namespace)
        shutil.rmtree(self._names, ignore_errors=True)


@contextlib.contextmanager
def two_hosts(delay: float, rate: float) -> Iterator[tuple[tuple[Host, Host], Link]]:
    """Two hosts and the link between them, for as long as the context lasts.

    delay: seconds, one way. rate: bits per second, each way.
    """
    folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
    hosts = Host(0, folder), Host(1, folder)
    link = Link([host.tunnel for host in hosts], delay, rate)
    try:
        yield hosts, link
    finally:
        link.close()
        for host in hosts:
            host.close()
        shutil.rmtree(folder, ignore_errors=True)


def missing() -> str:
    """Why there can be no two hosts here; "" where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program}: install iproute2 and util-linux"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    return ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _tunnel(namespace: str) -> int:
    """A tunnel that the namespace sees as its interface tun0, and this process as a file of packets."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    made: list[int] = []

    def make() -> None:  # in a thread of its own, which alone enters the namespace
        with open(f"/run/netns/{namespace}") as entered:
            if library.setns(entered.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
        tunnel = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22s", b"tun0", _IFF_TUN | _IFF_NO_PI, b""))
        made.append(tunnel)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
