import pytest
import torch

from kondo_lab.models.architecture import Architecture, language
from kondo_lab.models.generate import generate
from lab.training import language_toys as toys
from tolerances import assert_close

REPEATS = 3
BOTH = {
    "papers": Architecture(width=8, ff_width=12),
    "language": language(width=16, num_layers=2, num_heads=2),
}


@pytest.mark.parametrize("answer_length", [1, 2, 5])
@pytest.mark.parametrize("scaled", [False, True], ids=["kernels", "products"])
@pytest.mark.parametrize("own", BOTH.values(), ids=BOTH)
def test_both_ways_of_attention_see_the_logits_of_whole_rows(own, scaled, answer_length):
    model = toys.model(own, answer_length=answer_length)
    parameters, tokens = toys.parameters(model), toys.tokens(model, rows=4 * REPEATS)
    prompts = tokens[:, ::REPEATS, : model.prompt_length]
    answers = tokens[..., model.prompt_length :]
    seen = []

    def choose(place, logits):
        seen.append(logits)
        return answers[..., place]

    weights = model.weights(parameters, scaled=scaled)
    with torch.no_grad():
        generate(weights, prompts, choose, answer_length=answer_length, repeats=REPEATS)
    rows = torch.cat([prompts.repeat_interleave(REPEATS, 1), answers], dim=2)
    found = torch.stack(seen, dim=2).log_softmax(dim=-1)
    assert_close(found, model.log_softmax(parameters, rows))
