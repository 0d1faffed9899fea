"""Training: one trainer. A member is a model, a gate, a loss and a learning rate."""
