"""What mpiexec starts in the place of a rank of a pool: it hands its place over, and ends when the rank has ended.

    mpiexec -n SIZE python -IS mpi_place.py FOLDER

The rank was forked from a process that has imported torch. It listens at a socket in the folder, whose name is its
number.
"""

import os
import socket
import sys
import time

NUMBERS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")


def hand_over(folder: str) -> None:
    number = next(os.environ[name] for name in NUMBERS if name in os.environ)
    connections = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
    with socket.socket(socket.AF_UNIX) as rank:
        while rank.connect_ex(os.path.join(folder, number)):  # it does not listen yet
            time.sleep(0.01)
        socket.send_fds(rank, [str(os.getpid()).encode()], connections)
        rank.recv(1)


if __name__ == "__main__":
    hand_over(sys.argv[1])
