"""The published recipe, 360M: no recursion."""

preset = "vanilla-360m"
out_dir = "out-vanilla-360m"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 57  # 5% of the steps of 2e18 FLOPs, the smallest published budget
