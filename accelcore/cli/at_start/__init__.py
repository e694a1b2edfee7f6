"""A folder for the front of PYTHONPATH: what Python runs in it when a rank of `accelcore run` starts."""
