"""The tasks' rules on Python lists, one token at a time. Imports nothing."""


def reversal(prompt, num_tokens, reverse=True, increment=False):
    answer = []
    for place in range(len(prompt)):
        token = prompt[len(prompt) - 1 - place] if reverse else prompt[place]
        if increment:
            token = 0 if token == num_tokens - 1 else token + 1
        answer.append(token)
    return answer


def bit_parity(prompt):
    return ["".join(map(str, prompt[: i + 1])).count("1") % 2 for i in range(len(prompt))]


def key_value(prompt, num_pairs):
    table = {}
    for pair in range(num_pairs):
        table[prompt[2 * pair]] = prompt[2 * pair + 1]
    return [table[query] for query in prompt[2 * num_pairs :]]


def subsequence_match(prompt, pattern_length):
    pattern, text = prompt[:pattern_length], prompt[pattern_length:]
    marks = [0] * len(text)
    for start in range(len(text)):
        if text[start : start + pattern_length] == pattern:
            for place in range(start, start + pattern_length):
                marks[place] = 1
    return marks


def reward(answer, target, credit, kappa):
    right = 0
    for a, b in zip(answer, target, strict=True):
        if a == b:
            right += 1
        elif credit == "to_first_error":
            break
    return kappa * right / len(target) + (1 - kappa) * (answer == target)
