"""The published recipe, 135M: expert-choice, R = 4."""

preset = "mor-135m"
n_recursion = 4
out_dir = "out-mor-135m-expert-r4"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 250  # 5% of the steps of 2e18 FLOPs, the smallest published budget
