"""The parts of a training's state, one file each where it is more than a few lines."""
