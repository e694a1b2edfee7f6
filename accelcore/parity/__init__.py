"""Record a training run, replay it elsewhere, and name the first place where the two diverge.

`accelcore.Record` and `accelcore.Replay` are the public names; `accelcore record` and `accelcore replay` are the same
for a script. Here is what observes, stores and compares two runs; what chooses between precisions is in `advise`. Only
the command line imports this package. Begin to read with `record`, `collector` and `compare`.
"""
