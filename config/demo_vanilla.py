"""The demo without recursion: same width, same unrolled depth, and the FLOPs of `python train.py`."""

sharing = "none"
n_recursion = 1
routing = "none"
out_dir = "out-vanilla"
max_flops = 1.19e13  # as `python flops.py` counts for the 1000 steps of the demo
