"""The demo without recursion: same width, same unrolled depth, and the FLOPs of `python train.py`."""

sharing = "none"
n_recursion = 1
routing = "none"
out_dir = "out-vanilla"
max_flops = 1.428e13  # as `python flops.py` counts for 1200 steps of the demo
