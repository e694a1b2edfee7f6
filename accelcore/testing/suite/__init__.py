"""Test classes of the conformance suite, one for each role, for the backend and for training."""

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))  # before import
