"""The file of a small machine."""

TEXT = """
name = "two nodes of two"
[device]
flops = 1e12
efficiency = 0.5
bandwidth = 1e11
kernel = 1e-6
memory = "16GiB"
[host]
operator = 1e-4
asynchronous = true
[node]
ranks = 2
latency = 1e-6
bandwidth = 1e10
[network]
latency = 1e-5
bandwidth = 1e9
"""
