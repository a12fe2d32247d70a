"""The published recipe, 360M: R = 4, every token takes every step."""

preset = "recursive-360m"
n_recursion = 4
out_dir = "out-recursive-360m-r4"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 54  # 5% of the steps of 2e18 FLOPs, the smallest published budget
