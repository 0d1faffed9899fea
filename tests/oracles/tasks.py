"""The tasks' rules on Python lists, one token at a time. Imports nothing."""


def reversal(prompt, num_tokens, reverse=True, increment=False):
    answer = []
    for place in range(len(prompt)):
        token = prompt[len(prompt) - 1 - place] if reverse else prompt[place]
        if increment:
            token = 0 if token == num_tokens - 1 else token + 1
        answer.append(token)
    return answer


def reward(answer, target, credit, kappa):
    right = 0
    for a, b in zip(answer, target, strict=True):
        if a == b:
            right += 1
        elif credit == "to_first_error":
            break
    return kappa * right / len(target) + (1 - kappa) * (answer == target)
