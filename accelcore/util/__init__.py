"""Small helpers: containers of tensors, text of messages. They know nothing of devices or training."""
