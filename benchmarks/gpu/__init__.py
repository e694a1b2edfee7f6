"""What training on a GPU takes, beside the same training written by hand: run by scripts/gpu_check.py."""
