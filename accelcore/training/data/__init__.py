"""Data of a training: streams of batches with a position, their division among ranks, evaluation."""
