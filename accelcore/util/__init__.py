"""Small helpers: containers of tensors, text, units of rounding. They know nothing of devices or training."""
