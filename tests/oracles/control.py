"""Advantages of control tasks, written the obvious way."""


def gae(rewards, values, terminated, ended, gamma, gae_lambda):
    """Sum over later steps of (gamma lambda)^k delta, up to the episode's end; lists of floats.

    `values` has one number more than `rewards`: that of the state after the last step.
    """
    advantages = []
    for start in range(len(rewards)):
        total, factor = 0.0, 1.0
        for step in range(start, len(rewards)):
            beyond = 0.0 if terminated[step] else values[step + 1]
            total += factor * (rewards[step] + gamma * beyond - values[step])
            factor *= gamma * gae_lambda
            if ended[step]:
                break
        advantages.append(total)
    return advantages
