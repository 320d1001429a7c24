"""Tools for tests of memory: an accelerator without hardware that counts its bytes and can run out of them."""

from lightning_memkit.testing.fake_device import FakeDevice, Transfers, compiler, fake_device

__all__ = ["FakeDevice", "Transfers", "compiler", "fake_device"]
