"""Support of the conformance suite: oracles, jobs of ranks, kinds of cases, the report."""
