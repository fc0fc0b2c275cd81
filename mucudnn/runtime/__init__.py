"""The code that torch calls at every convolution of a program: it computes the call, or leaves it to torch."""
