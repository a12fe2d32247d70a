"""The published recipe, 360M: token-choice, R = 3."""

preset = "mor-360m"
n_recursion = 3
routing = "token"
z_coeff = 1e-5
out_dir = "out-mor-360m-token-r3"
dataset = "fineweb_edu"
global_batch_size = 1024
max_flops = 16.5e18
warmup_iters = 86  # 5% of the steps of 2e18 FLOPs, the smallest published budget
