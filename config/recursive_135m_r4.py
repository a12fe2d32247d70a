"""The published recipe, 135M: R = 4, every token takes every step."""

preset = "recursive-135m"
n_recursion = 4
out_dir = "out-recursive-135m-r4"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 154  # 5% of the steps of 2e18 FLOPs, the smallest published budget
