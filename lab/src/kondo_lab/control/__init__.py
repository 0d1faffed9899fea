"""Control tasks of Gymnasium: rollouts in vector environments, actor and critic, gated training."""
