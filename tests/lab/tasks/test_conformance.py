"""What every task promises, whichever it is."""

import pytest
import torch

from kondo_lab.tasks.bandits import ImageBandit
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.images import Images
from kondo_lab.tasks.reversal import ReversalTask
from oracles import tasks as oracle
from tolerances import assert_close

CREDITS = ["to_first_error", "bag_of_tokens"]

# name -> (make(**options), oracle of the right answer)
SEQUENCES = {
    "reversal": (
        lambda **options: ReversalTask(length=7, num_tokens=3, **options),
        lambda prompt: oracle.reversal(prompt, 3),
    ),
    "copy": (
        lambda **options: ReversalTask(length=7, num_tokens=3, reverse=False, **options),
        lambda prompt: oracle.reversal(prompt, 3, reverse=False),
    ),
    "reversal + 1": (
        lambda **options: ReversalTask(length=7, num_tokens=3, increment=True, **options),
        lambda prompt: oracle.reversal(prompt, 3, increment=True),
    ),
    "copy + 1": (
        lambda **options: ReversalTask(
            length=7, num_tokens=3, reverse=False, increment=True, **options
        ),
        lambda prompt: oracle.reversal(prompt, 3, reverse=False, increment=True),
    ),
}


def tiny_images():
    images = torch.arange(30 * 5, dtype=torch.uint8).view(30, 5)
    labels = torch.arange(30) % 4
    return Images(images, labels, images[:3], labels[:3], white=200)


# name -> make(device)
CONTEXTS = {
    "images": lambda device: ImageBandit("tiny", tiny_images(), num_actions=4, device=device),
    "digits": ImageBandit.digits,
}


SIZE = 12


def make(name, device):
    if name in SEQUENCES:
        return SEQUENCES[name][0]()
    return CONTEXTS[name](device)


def play(name, task, draws, step):
    """All that a task draws and pays at one step, each [P, SIZE, ...]."""
    if name in SEQUENCES:
        prompts = task.prompts(draws, step, SIZE)
        return [prompts, task.reward(prompts, task.target(prompts.flip(1)))]
    inputs, labels = task.draw(draws, step, SIZE)
    return [inputs, labels, task.reward(labels, labels.flip(1))]


def draw(name, seeds, step, device="cpu"):
    return play(name, make(name, device), Draws(seeds, device), step)


def same(drawn, others):
    return all(torch.equal(a, b) for a, b in zip(drawn, others, strict=True))


ALL = [*SEQUENCES, *CONTEXTS]


@pytest.mark.parametrize("name", ALL)
class TestDrawing:
    def test_same_seed_and_step_draw_the_same(self, name, device):
        assert same(draw(name, [3, 4], 7, device=device), draw(name, [3, 4], 7, device=device))

    def test_a_member_does_not_depend_on_its_neighbours(self, name, device):
        among = [part[1:2] for part in draw(name, [3, 4, 5], 7, device=device)]
        assert same(among, draw(name, [4], 7, device=device))

    def test_a_step_may_be_a_tensor_on_the_device(self, name, device):
        step = torch.tensor(7, device=device)
        assert same(draw(name, [3, 4], step, device=device), draw(name, [3, 4], 7, device=device))

    def test_devices_draw_the_same(self, name, device):
        for here, there in zip(draw(name, [3], 7), draw(name, [3], 7, device=device), strict=True):
            assert there.device.type == device.type
            assert_close(there, here)

    def test_nothing_waits_for_the_device(self, name):
        # A meta tensor has no values: whatever looks at one on the host raises.
        for part in draw(name, [3, 4], torch.tensor(7, device="meta"), device="meta"):
            assert part.shape[:2] == (2, SIZE)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    def test_a_cuda_graph_moves_on_with_its_step(self, name):
        step = torch.tensor(0, device="cuda")
        task, draws = make(name, "cuda"), Draws([3, 4], "cuda")
        play(name, task, draws, step)  # warm up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = play(name, task, draws, step)
        for moment in (5, 6):
            step.fill_(moment)
            graph.replay()
            assert same(captured, play(name, task, draws, moment))


@pytest.mark.parametrize("name", ALL)
def test_seeds_and_steps_draw_differently(name):
    drawn = [draw(name, [seed], step)[0] for seed in (3, 4) for step in (7, 8)]
    assert len({tuple(part.flatten().tolist()) for part in drawn}) == 4


@pytest.mark.parametrize("name", SEQUENCES)
class TestSequences:
    def test_prompts_are_tokens(self, name, device):
        rule = SEQUENCES[name][0]()
        prompts = rule.prompts(Draws(range(20), device), 7, 50)
        assert (prompts.shape, prompts.dtype) == ((20, 50, rule.prompt_length), torch.int64)
        assert prompts.device.type == device.type
        assert sorted(prompts.unique().tolist()) == list(range(rule.num_tokens))
        assert rule.name == name

    def test_target_is_the_oracles(self, name, device):
        make, answer_of = SEQUENCES[name]
        rule = make()
        prompts = rule.prompts(Draws(range(4), device), 7, 50)
        target = rule.target(prompts)
        assert (target.shape, target.dtype) == ((4, 50, rule.answer_length), torch.int64)
        assert target.device.type == device.type
        expected = [[answer_of(prompt) for prompt in member] for member in prompts.tolist()]
        assert target.tolist() == expected
        assert target.max() < rule.num_tokens

    @pytest.mark.parametrize("credit", CREDITS)
    @pytest.mark.parametrize("kappa", [1.0, 0.3, 0.0])
    def test_reward_is_the_oracles(self, name, credit, kappa, device):
        make, answer_of = SEQUENCES[name]
        rule = make(reward=credit, kappa=kappa)
        draws = Draws(range(3), device)
        prompts = rule.prompts(draws, 7, 40)
        # Each token is right with probability 0.8 or by luck: some answers are right as a whole.
        target = rule.target(prompts)
        luck = draws.integers("luck", 7, rule.num_tokens, *target.shape[1:])
        answers = torch.where(draws.uniform("right", 7, *target.shape[1:]) < 0.8, target, luck)
        rewards = rule.reward(prompts, answers)
        expected = [
            oracle.reward(answer, answer_of(prompt), credit, kappa)
            for prompt, answer in zip(
                prompts.flatten(0, 1).tolist(), answers.flatten(0, 1).tolist(), strict=True
            )
        ]
        assert (rewards.dtype, rewards.shape) == (torch.float32, (3, 40))
        assert_close(rewards.flatten(), torch.tensor(expected))
        assert 0 <= rewards.min() < rewards.max() <= 1

    @pytest.mark.parametrize("credit", CREDITS)
    @pytest.mark.parametrize("kappa", [1.0, 0.3, 0.0])
    def test_the_right_answer_alone_earns_exactly_one(self, name, credit, kappa):
        rule = SEQUENCES[name][0](reward=credit, kappa=kappa)
        prompts = rule.prompts(Draws([3, 4]), 7, 30)
        target = rule.target(prompts)
        assert (rule.reward(prompts, target) == 1).all()
        for place in range(rule.answer_length):
            wrong = target.clone()
            wrong[..., place] = (wrong[..., place] + 1) % rule.num_tokens
            assert (rule.reward(prompts, wrong) < 1).all()

    def test_any_leading_dimensions(self, name):
        rule = SEQUENCES[name][0]()
        prompts = rule.prompts(Draws([3, 4]), 7, 6)
        answers = rule.target(prompts.flip(1))
        expected = rule.reward(prompts, answers)
        assert rule.reward(prompts[0, 0], answers[0, 0]) == expected[0, 0]
        folded = rule.reward(
            prompts.view(2, 3, 2, rule.prompt_length), answers.view(2, 3, 2, rule.answer_length)
        )
        assert torch.equal(folded.flatten(1), expected)

    def test_wrong_shapes_are_refused(self, name):
        rule = SEQUENCES[name][0]()
        prompts = rule.prompts(Draws([3]), 7, 2)
        target = rule.target(prompts)
        with pytest.raises(ValueError, match=f"prompts must have {rule.prompt_length} tokens"):
            rule.reward(prompts[..., 1:], target)
        with pytest.raises(ValueError, match=f"answers must have {rule.answer_length} tokens"):
            rule.reward(prompts, target[..., 1:])
        with pytest.raises(ValueError, match=r"leading shape of prompts, \(1, 2\), got \(2, 2\)"):
            rule.reward(prompts, target.expand(2, -1, -1))

    def test_unknown_rewards_are_refused(self, name):
        make = SEQUENCES[name][0]
        with pytest.raises(ValueError, match=r"reward must be one of .* got 'best'"):
            make(reward="best")
        with pytest.raises(ValueError, match=r"kappa must be in \[0, 1\], got 1.5"):
            make(kappa=1.5)


@pytest.mark.parametrize("name", CONTEXTS)
class TestContexts:
    def test_inputs_and_labels(self, name, device):
        task = CONTEXTS[name](device)
        inputs, labels = task.draw(Draws(range(3), device), 7, 200)
        assert (labels.shape, labels.dtype) == ((3, 200), torch.int64)
        assert inputs.device.type == labels.device.type == device.type
        assert labels.unique().tolist() == list(range(task.num_actions))
        assert (inputs.shape, inputs.dtype) == ((3, 200, task.num_inputs), torch.float32)
        assert 0 <= inputs.min() < inputs.max() <= 1

    def test_one_input_of_a_member_has_one_label(self, name):
        inputs, labels = CONTEXTS[name]("cpu").draw(Draws([3]), 7, 400)
        known = {}
        for row, label in zip(inputs[0].tolist(), labels[0].tolist(), strict=True):
            known.setdefault(str(row), set()).add(label)
        assert len(known) > 20
        assert all(len(found) == 1 for found in known.values())

    def test_reward_is_one_for_the_label_and_zero_for_all_else(self, name, device):
        task = CONTEXTS[name](device)
        _, labels = task.draw(Draws([3, 4], device), 7, 5)
        for shift in range(task.num_actions):
            rewards = task.reward(labels, (labels + shift) % task.num_actions)
            assert rewards.dtype == torch.float32
            assert rewards.tolist() == [[float(shift == 0)] * 5] * 2
