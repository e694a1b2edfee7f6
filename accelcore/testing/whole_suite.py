"""Test module with the whole suite, which `accelcore verify` gives to pytest."""

from accelcore.testing import *  # noqa: F403
