"""Parts of a checkpoint: model, optimizer, and the progress of a training."""
