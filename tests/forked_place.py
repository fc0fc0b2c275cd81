"""A program that takes the place of a Python process, whose work a process does that has imported torch before.

    python -IS forked_place.py FOLDER WORDS...

It hands its files, its folder and its environment over at a socket in FOLDER, passes signals on, and ends as the other
does. If it is killed, or what has started it, so is the other one. Options of Python it leaves to Python.
See `forked_python.py`.
"""

import marshal
import os
import select
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
JOB = ["-m", "distconv", "run"]


def stand_in(folder: str, words: list[str]) -> int:
    """The exit code of the other process, -n where signal n has ended it."""
    files, parent = [0, 1, 2], os.getppid()
    if "PMI_FD" in os.environ:  # the connection to mpiexec
        files.append(int(os.environ["PMI_FD"]))
    request = marshal.dumps((words, os.getcwd(), dict(os.environ)))
    with socket.socket(socket.AF_UNIX) as place:
        place.connect(os.path.join(folder, "jobs" if words[words[0] == "-u" :][:3] == JOB else "scripts"))
        socket.send_fds(place, [len(request).to_bytes(8, "big")], files)
        place.sendall(request)
        told = place.makefile()
        process = int(told.readline())
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(process, number))
        while not select.select([place], [], [], 1.0)[0]:
            if os.getppid() != parent:  # whoever started it was killed: a rank under torchrun would end, too
                return 1
        return int(told.readline())


if __name__ == "__main__":
    if sys.argv[2][:1] == "-" and sys.argv[2] not in ("-u", "-m", "-c"):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    code = stand_in(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
