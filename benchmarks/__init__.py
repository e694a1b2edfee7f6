"""Benchmarks of accelcore: `python -m benchmarks NAME`. They are not part of any distribution."""
