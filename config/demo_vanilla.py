"""The demo without recursion: same width, same unrolled depth, and the FLOPs of `python train.py`."""

sharing = "none"
n_recursion = 1
routing = "none"
out_dir = "out-vanilla"
max_flops = 8.33e12  # as `python flops.py --max_iters=700` counts for the 700 steps of the demo
