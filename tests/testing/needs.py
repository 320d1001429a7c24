"""Marks of tests that need what a machine may lack."""

import pytest

from tests.testing.fake_device import compiler

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="the device 'fake' needs a C++ compiler")
