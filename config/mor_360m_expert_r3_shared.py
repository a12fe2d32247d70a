"""The published recipe, 360M: expert-choice, R = 3, keys and values shared."""

preset = "mor-360m"
n_recursion = 3
kv_mode = "shared"
out_dir = "out-mor-360m-expert-r3-shared"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 89  # 5% of the steps of 2e18 FLOPs, the smallest published budget
