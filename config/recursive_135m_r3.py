"""The published recipe, 135M: R = 3, every token takes every step."""

preset = "recursive-135m"
n_recursion = 3
out_dir = "out-recursive-135m-r3"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 144  # 5% of the steps of 2e18 FLOPs, the smallest published budget
