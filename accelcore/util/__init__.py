"""Small helpers: containers of tensors, text. They know nothing of devices or training."""
