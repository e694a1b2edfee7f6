"""Test classes of the conformance suite, one for each role, for the backend and for training."""
