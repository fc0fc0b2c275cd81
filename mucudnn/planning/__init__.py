"""Makes a plan for a convolution problem within a workspace limit."""
