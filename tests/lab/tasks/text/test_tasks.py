"""What every text task promises, whichever it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import END, NUM_TOKENS, PAD, TASKS, base, decode, encode, make
from kondo_lab.tasks.text.alphabet import CHARACTERS
from lab.tasks.text.texts import CASES, LEVELS, rewards_and_checks

every_case = pytest.mark.parametrize(("name", "level"), CASES)
SIZE = 6


def play(task, draws, step):
    """All that a task draws, shows and pays at one step."""
    prompts = task.prompts(draws, "play", step, SIZE)
    held_out = task.prompts(draws, "play", step, SIZE, held_out=True)
    shown = task.demonstrations(prompts)
    return [prompts, held_out, shown, task.reward(prompts, shown.flip(1))]


def same(played, others):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(played, others, strict=True))


def drawn(task, count, *, seed=0, step=0, **options):
    return task.prompts(Draws([seed]), "test", step, count, **options)[0]


def test_tasks_are_made_by_name():
    assert list(TASKS) == list(LEVELS)
    for name, level in CASES:
        task = make(name, level)
        assert (task.name, task.level, type(task)) == (name, level, TASKS[name])


def test_unknown_names_and_levels_are_refused():
    with pytest.raises(ValueError, match=r"name must be one of addition, .*, got 'division'"):
        make("division", 1)
    for name in TASKS:
        for level in (0, 17):
            with pytest.raises(ValueError, match=rf"level must lie in 1 .. \d+ for {name}, got"):
                make(name, level)


@every_case
class TestDrawing:
    def test_prompts_have_one_length_and_no_pad_or_end(self, name, level, device):
        task = make(name, level)
        for held_out in (False, True):
            prompts = task.prompts(Draws([3, 4], device), "test", 0, 40, held_out=held_out)
            assert (prompts.shape, prompts.dtype) == ((2, 40, task.prompt_length), torch.int64)
            assert prompts.device.type == device.type
            assert prompts.min() > END
            assert prompts.max() < NUM_TOKENS

    def test_a_member_does_not_depend_on_its_neighbours(self, name, level, device):
        task = make(name, level)
        among = [part[1:2] for part in play(task, Draws([3, 4, 5], device), 7)]
        # The rewards are of neighbouring rows of the same member.
        assert same(among, play(task, Draws([4], device), 7))

    def test_seeds_steps_streams_and_sides_draw_differently(self, name, level):
        task = make(name, level)
        draws = [
            task.prompts(Draws([seed]), stream, step, 20, held_out=held_out)
            for seed in (3, 4)
            for stream in "xy"
            for step in (7, 8)
            for held_out in (False, True)
        ]
        assert len({tuple(prompts.flatten().tolist()) for prompts in draws}) == len(draws)

    def test_a_step_may_be_a_tensor_and_devices_draw_the_same(self, name, level, device):
        task = make(name, level)
        there = play(task, Draws([3, 4], device), torch.tensor(7, device=device))
        assert same(play(task, Draws([3, 4]), 7), there)

    def test_nothing_waits_for_the_device(self, name, level):
        # A meta tensor has no values: whatever looks at one on the host raises.
        played = play(make(name, level), Draws([3, 4], "meta"), torch.tensor(7, device="meta"))
        assert all(part.shape[:2] == (2, SIZE) for part in played)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
    def test_a_cuda_graph_moves_on_with_its_step(self, name, level):
        step = torch.tensor(0, device="cuda")
        task, draws = make(name, level), Draws([3, 4], "cuda")
        play(task, draws, step)  # warm up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = play(task, draws, step)
        for moment in (5, 6):
            step.fill_(moment)
            graph.replay()
            assert same(captured, play(task, Draws([3, 4]), moment))


@every_case
class TestSides:
    def test_no_content_is_on_both_sides(self, name, level):
        task = make(name, level)
        sides = []
        for held_out in (False, True):
            contents = set()
            for step in range(3):
                prompts = drawn(task, 200, step=step, held_out=held_out)
                assert (task.is_held_out(prompts) == held_out).all()
                contents |= {tuple(content) for content in task._content(prompts).tolist()}
            sides.append(contents)
        train, test = sides
        assert train.isdisjoint(test)
        assert min(len(train), len(test)) > 40

    def test_one_content_in_eight_is_held_out(self, name, level):
        task = make(name, level)
        prompts = task._draw(Draws([0]), "test", 0, 8000)[0]
        contents = task._content(prompts).unique(dim=0)
        share = float(task.is_held_out(prompts).float().mean())
        # Five standard errors; prompts of one content are no independent sample.
        error = (1 / 8 * 7 / 8 / len(contents)) ** 0.5
        assert abs(share - 1 / 8) < 5 * error

    @pytest.mark.parametrize("held_out", [False, True])
    def test_the_first_candidate_of_the_side_is_taken(self, name, level, held_out):
        task, draws, count = make(name, level), Draws([0, 1]), 12
        rounds = [
            task._draw(draws, f"test/{attempt}", 5, count * base.CANDIDATES).view(
                2, count, base.CANDIDATES, -1
            )
            for attempt in range(base.HELD_OUT_ROUNDS)
        ]
        prompts = task.prompts(draws, "test", 5, count, held_out=held_out)
        for member in range(2):
            for place in range(count):
                candidates = [one for tried in rounds for one in tried[member, place]]
                fitting = (one for one in candidates if bool(task.is_held_out(one)) == held_out)
                assert torch.equal(prompts[member, place], next(fitting))

    @pytest.mark.parametrize("held_out", [False, True])
    def test_where_no_candidate_fits_a_fixed_prompt_of_the_side_stands_in(
        self, name, level, held_out, monkeypatch
    ):
        task = make(name, level)
        with monkeypatch.context() as patch:
            patch.setattr(
                task, "is_held_out", lambda prompts: torch.full(prompts.shape[:-1], not held_out)
            )
            prompts = drawn(task, 5, held_out=held_out)
        assert (prompts == prompts[0]).all()
        assert (task.is_held_out(prompts) == held_out).all()
        assert (task.reward(prompts, task.demonstrations(prompts)) == 1).all()


@every_case
class TestAnswers:
    def test_demonstrations_are_right_and_end(self, name, level, device):
        task = make(name, level)
        prompts = task.prompts(Draws([3, 4], device), "test", 0, 60)
        shown = task.demonstrations(prompts)
        assert (shown.shape, shown.dtype) == ((2, 60, task.answer_length), torch.int64)
        assert task.reward(prompts, shown).tolist() == [[1.0] * 60] * 2
        for prompt, ids in zip(prompts.flatten(0, 1), shown.flatten(0, 1), strict=True):
            text = decode(ids)
            assert task.check(decode(prompt), text)
            assert text.endswith(".")
            assert ids.tolist() == encode(text) + [PAD] * (task.answer_length - len(text))

    def test_the_longest_demonstration_fills_the_answer(self, name, level):
        task = make(name, level)
        prompts = drawn(task, 2000 if level < 4 else 300)
        longest = int((task.demonstrations(prompts) != PAD).sum(dim=-1).max())
        slack = 6 if name == "addition" and level == 16 else 0  # all carries at once are rare
        assert task.answer_length - slack <= longest <= task.answer_length

    def test_any_leading_shape_will_do(self, name, level):
        task = make(name, level)
        prompts = drawn(task, 6)
        shown = task.demonstrations(prompts)
        assert torch.equal(task.demonstrations(prompts[0]), shown[0])
        folded = task.demonstrations(prompts.view(1, 3, 2, -1))
        assert torch.equal(folded.flatten(0, 2), shown)
        rewards = task.reward(prompts, shown.flip(0))
        assert rewards.dtype == torch.float32
        assert task.reward(prompts[0], shown[5]) == rewards[0]
        assert torch.equal(
            task.reward(prompts.view(1, 3, 2, -1), shown.flip(0).view(1, 3, 2, -1)).flatten(),
            rewards,
        )

    def test_wrong_shapes_are_refused(self, name, level):
        task = make(name, level)
        prompts = drawn(task, 2)
        shown = task.demonstrations(prompts)
        with pytest.raises(ValueError, match=f"prompts must have {task.prompt_length} tokens"):
            task.reward(prompts[..., 1:], shown)
        with pytest.raises(ValueError, match=f"completions must have {task.answer_length} tokens"):
            task.reward(prompts, shown[..., 1:])
        with pytest.raises(ValueError, match=r"leading shape of prompts, \[2\], got \[1\]"):
            task.reward(prompts, shown[:1])

    @settings(max_examples=20)
    @given(data=st.data())
    def test_reward_and_check_agree_on_corrupted_demonstrations(self, name, level, data):
        task = make(name, level)
        prompts = drawn(task, 8, seed=data.draw(st.integers(0, 10**6)))
        texts = [data.draw(corruptions(decode(shown))) for shown in task.demonstrations(prompts)]
        rewards, checks = rewards_and_checks(task, prompts, texts)
        assert rewards == checks

    @settings(max_examples=20)
    @given(text=st.text(alphabet="0123456789=.", max_size=12) | st.text(alphabet=CHARACTERS))
    def test_reward_and_check_agree_on_any_text(self, name, level, text):
        task = make(name, level)
        rewards, checks = rewards_and_checks(task, drawn(task, 4), [text] * 4)
        assert rewards == checks

    def test_what_follows_the_end_is_ignored_and_no_end_is_wrong(self, name, level):
        task = make(name, level)
        prompts = drawn(task, 30)
        shown = task.demonstrations(prompts)
        junk = torch.randint(NUM_TOKENS, shown.shape, generator=torch.Generator().manual_seed(0))
        after = (shown == END).cumsum(dim=-1) - (shown == END).long() > 0
        assert (task.reward(prompts, torch.where(after, junk, shown)) == 1).all()
        for other in (PAD, encode("0")[0], encode(",")[0]):
            assert (task.reward(prompts, shown.where(shown != END, other)) == 0).all()

    def test_a_right_answer_to_another_prompt_is_wrong(self, name, level):
        task = make(name, level)
        prompts = drawn(task, 200)
        shown = task.demonstrations(prompts.roll(1, 0))
        # By chance a few prompts share an answer.
        assert task.reward(prompts, shown).mean() < 0.1


@st.composite
def corruptions(draw, text):
    """A right completion with a few characters changed, lost, added, swapped or repeated."""
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        character = draw(st.sampled_from(CHARACTERS) | st.sampled_from("0=.>,"))
        other = draw(st.integers(0, max(len(text) - 1, 0)))
        low, high = sorted((at, other))
        text = draw(
            st.sampled_from(
                [
                    text[:at] + character + text[at + 1 :],
                    text[:at] + text[at + 1 :],
                    text[:at] + character + text[at:],
                    text[:low] + text[high:],
                    text[low:],
                    text[:high] + text[low:],
                    text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
                ]
            )
        )
    return text
