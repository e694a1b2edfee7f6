"""The stages of making a training ready, one file each."""
