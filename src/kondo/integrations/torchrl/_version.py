"""The versions of TorchRL that the tests pass with; importing this checks them."""

from kondo.integrations.framework import Framework

TORCHRL = Framework(package="torchrl", lowest=(0, 14), below=(0, 15), tested="0.14.1")

TORCHRL.check(TORCHRL.installed)
