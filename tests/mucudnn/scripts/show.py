"""Prints what a script can see of how it was started."""

import sys

import neighbour

print(__name__, __file__, __package__, __spec__ and __spec__.name, __cached__, type(__loader__).__name__, __doc__)
print(sys.argv, sys.path[0], len(sys.path), neighbour.__name__)
print(sys.modules["__main__"].__dict__ is globals(), type(__builtins__).__name__)
