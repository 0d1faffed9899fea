"""Continuous actions on many ranks: the kept set and gradient of one process with all rows."""

import pytest

import kondo
from ranks import cases
from ranks.problems import gradients, normal_problem
from steps import run_step
from tolerances import assert_close


@pytest.mark.parametrize("splits", [(13, 8), (21, 0)])
@pytest.mark.parametrize("screen", [None, "draft", "pair"])
def test_densities_of_two_ranks_are_gated_as_in_one_process(crew, screen, splits):
    model, policy, batch, advantages = normal_problem(21)
    alone = run_step(policy, batch, advantages, gate=kondo.Gate(rate=0.3))
    wanted = gradients(model)
    for answer in crew.run(cases.density_step, 2, splits, screen, {"rate": 0.3}):
        assert answer["report"]["kept"] == alone.kept == 6
        assert answer["report"]["price"] == alone.price
        for name, gradient in wanted.items():
            assert_close(answer["grads"][name], gradient)


def test_ranks_that_differ_in_whether_a_screen_is_of_densities_are_refused(crew):
    for message in crew.run(cases.differing_density_step, 2):
        assert "screen, of densities or not, must be the same on all ranks" in message
