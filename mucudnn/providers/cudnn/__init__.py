"""The algorithms of cuDNN 9, on the libcudnn that torch has loaded."""
