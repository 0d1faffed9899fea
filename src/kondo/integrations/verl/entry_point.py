"""What verl imports at its start; see `plugin`."""

from kondo.integrations.verl.plugin import install

install()
