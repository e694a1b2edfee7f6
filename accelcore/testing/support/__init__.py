"""Support of the conformance suite: oracles, jobs of ranks, kinds of cases, the report."""

UNUSABLE = 9
"""Exit code of the suite's process if the device has become unusable in it; another process runs the other tests."""
