"""Studies: one folder each, with its claim, settings, run and analysis. `kondo list` shows them."""
