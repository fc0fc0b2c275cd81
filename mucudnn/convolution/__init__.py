"""What a convolution is: its problem, geometry and parts."""
