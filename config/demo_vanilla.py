"""The demo without recursion: same width, same unrolled depth, and the FLOPs of `python train.py`."""

sharing = "none"
n_recursion = 1
routing = "none"
out_dir = "out-vanilla"
max_flops = 9.52e12  # as `python flops.py --max_iters=800` counts for the 800 steps of the demo
