"""All of the suite, as a test module of its users has it; `accelcore verify` gives it to pytest."""

from accelcore.testing import *  # noqa: F403
