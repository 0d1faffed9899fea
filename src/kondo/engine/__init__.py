"""The gated step, one module a stage: screen -> select -> compact -> differentiate; see `step`."""
