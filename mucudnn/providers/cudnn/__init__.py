"""The algorithms of cuDNN 9, called in the libcudnn that torch has loaded."""
