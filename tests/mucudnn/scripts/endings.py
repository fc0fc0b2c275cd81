"""Ends in the way that its argument names."""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading

atexit.register(print, "at exit")


class Own:
    pass


def deeper():
    {}["missing"]


def fail():
    try:
        deeper()
    except KeyError as error:
        raise RuntimeError("a failure\nof two lines") from error


def spawn():
    child = multiprocessing.get_context("spawn").Process(target=print, args=(Own,))
    child.start()
    child.join()
    sys.exit(child.exitcode)


ENDINGS = {
    "end": lambda: print("the end"),
    "exit": sys.exit,
    "exit3": lambda: sys.exit(3),
    "exit-text": lambda: sys.exit("a last word"),
    "raise": fail,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or signal.pause(),
    "hook": lambda: (
        setattr(sys, "excepthook", lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_name)) or fail()
    ),
    "thread": lambda: threading.Thread(target=lambda: print("in a thread", flush=True)).start(),
    "pickle": lambda: print(type(pickle.loads(pickle.dumps(Own()))) is Own),
    "spawn": spawn,
    "output": lambda: (print("out"), print("err", file=sys.stderr)),
}

if __name__ == "__main__":
    ENDINGS[sys.argv[1]]()
