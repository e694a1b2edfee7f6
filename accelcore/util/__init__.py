"""Small helpers: containers of tensors, files, text. They know nothing of devices or training."""
