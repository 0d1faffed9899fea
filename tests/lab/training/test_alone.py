import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import kondo
from kondo import lm, signals
from kondo.lm import BudgetGate
from kondo_lab.models.architecture import language
from kondo_lab.models.decoder import StackedDecoder
from kondo_lab.studies.lm_rl import step_seconds
from kondo_lab.studies.lm_rl.step_seconds import seconds_per_step
from kondo_lab.tasks.draws import Draws
from kondo_lab.training import decisions, diagnostics, language_arms, run, timed_step
from kondo_lab.training.alone import Learner
from kondo_lab.training.gates import DrawnVarianceGate, Everything
from kondo_lab.training.language_arms import text_arm
from kondo_lab.training.member import Frictions
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Shape, TextProgram
from kondo_lab.training.record import keeping
from kondo_lab.training.run import train
from kondo_lab.training.supervised import Start
from lab.made_up import lines_of
from lab.training.language_toys import member
from tolerances import assert_close

GRPO = {"loss": language_arms.CLIPPED, "divided": True}
by = partial(kondo.Gate, rate=0.2)
NUM_TOKENS, PROMPT_LENGTH, ANSWER_LENGTH = 6, 3, 4
GROUP, ROWS = 4, 32
MARK = "1"
"""One of the tokens that are drawn."""
EVERY = [
    *language_arms.published(rates=(0.1, 0.3), etas=(0.5,)),
    *language_arms.unbiased(rates=(0.3,), noises=(1.5,)),
    *language_arms.crossed(0.3)[2:],
    *language_arms.variants(0.3, mark=MARK),
    text_arm(name="DG sequences", gate=Everything(2.0)),
    text_arm(name="PODS groups", gate=DrawnVarianceGate(rate=0.5, group=4), **GRPO),
    text_arm(name="GRPO kept", gate=kondo.Gate(rate=0.2), denominator="kept", **GRPO),
    text_arm(name="random tokens", gate=by(signal=signals.uniform), unit="token"),
    text_arm(name="advantage tokens", gate=by(signal=signals.advantage), unit="token"),
    text_arm(name="|advantage|", gate=by(signal=signals.abs_advantage)),
    text_arm(name="budget of rows", gate=BudgetGate(budget=0.2)),
]
by_name = partial(pytest.mark.parametrize, "arm", ids=lambda each: each.name)
DENSE = text_arm(name="PG")
KEPT = text_arm(name="DG-K 30%", gate=kondo.Gate(rate=0.3))


class Echo:
    """Repeat the first token of the prompt, then end: a policy that knows nothing gets some."""

    title = "echo"
    prompt_length, answer_length = PROMPT_LENGTH, ANSWER_LENGTH

    def prompts(self, draws, stream, step, count, *, held_out=False):
        return 2 + draws.integers(f"{stream} {held_out}", step, NUM_TOKENS - 2, count, 3)

    def reward(self, prompts, completions):
        return (completions[..., 0] == prompts[..., 0]).float()


class Free(Echo):
    """Everybody is paid."""

    def reward(self, prompts, completions):
        return torch.ones(completions.shape[:2])


def tiny(dtype=torch.float32, seeds=(0,)):
    model = StackedDecoder(
        language(width=16, num_layers=1, num_heads=2),
        prompt_length=PROMPT_LENGTH,
        answer_length=ANSWER_LENGTH,
        num_tokens=NUM_TOKENS,
    )
    fresh = model.initialise(Draws(list(seeds)))
    # Opinions, so that surprises differ, but none so firm that answers do not.
    fresh["head"] *= 0.2 / fresh["head"].std()
    return model, {name: value.to(dtype) for name, value in fresh.items()}


def program_of(model, *, num_prompts=8, num_held_out=16, **options):
    shape = Shape(num_prompts=num_prompts, repeats=GROUP, num_held_out=num_held_out, **options)
    return TextProgram(Echo(), model, shape)


def learner(arm=KEPT, *, learning_rate=1e-2, **options):
    model, parameters = tiny()
    own = member(arm, learning_rate=learning_rate, **options)
    return Learner(program_of(model), parameters, own)


def experience(program, parameters, step=19):
    """Return experience of one member, and what its random choices are drawn from.

    By default it is a step at which every arm keeps something with an advantage.
    """
    draws = Draws([7])
    rolled = program.act(parameters, draws, torch.tensor(step))
    return rolled | {"rewards": program.pay(rolled)}, draws, step


def stacked_gradient(arm, program, parameters):
    """By the population's way: decide and loss, all rows in one graph."""
    rolled, draws, step = experience(program, parameters)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    decision = decisions.decide(program, arm, arm.gate, rolled, draws, step)
    new = program.outputs(leaves, rolled, None)
    total = decisions.loss(program, arm, new, rolled, decision, None).sum()
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    gradient = dict(zip(leaves, (each[0] for each in found), strict=True))
    return Expected(rolled, decision, total.detach(), gradient)


class Expected(NamedTuple):
    rolled: dict[str, torch.Tensor]
    decision: decisions.Decision
    loss: torch.Tensor
    gradient: dict[str, torch.Tensor]

    @property
    def weight(self):
        """[N, T]; 0 where a token is not trained."""
        mask, weight = self.rolled["mask"], self.decision.weight
        return (mask.double() if weight is None else weight * mask)[0]


def module_gradient(module):
    """By the parameters' stacked names; what the graph did not reach is 0."""
    named = {
        name.removeprefix("backbone.").replace("layers.", "").replace("weights.", ""): parameter
        for name, parameter in module.named_parameters()
    }
    named["head"] = named.pop("head.weight")
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in named.items()
    }


def product(arm, model, parameters, max_tokens, rolled=None):
    """Return what a step of the product did, and the gradient it left."""
    module, program = model.as_module(parameters, 0), program_of(model)
    policy = lm.CausalLM(module.backbone, head=module.head, max_tokens=max_tokens)
    own, draws, step = experience(program, parameters)
    own = own if rolled is None else rolled
    learned = timed_step.product_backward(arm, policy, program, own, draws, step)
    return learned, module_gradient(module)


def plain(arm, model, parameters, **options):
    """Return what a step without kondo did, and the gradient it left."""
    module, program = model.as_module(parameters, 0), program_of(model)
    inputs = experience(program, parameters)
    learned = timed_step.plain_backward(arm, module, program, *inputs, max_tokens=50, **options)
    return learned, module_gradient(module)


def same_gradient(found, expected):
    assert found.keys() == expected.gradient.keys()
    for name, gradient in found.items():
        assert_close(gradient, expected.gradient[name])


@by_name(EVERY)
def test_the_product_has_the_gradient_and_the_counts_of_the_populations_decision(arm):
    model, parameters = tiny(torch.float64)
    expected = stacked_gradient(arm, program_of(model), parameters)
    learned, found = product(arm, model, parameters, max_tokens=20)
    same_gradient(found, expected)
    assert any(gradient.any() for gradient in found.values())
    assert_close(learned.loss, expected.loss)
    counts = diagnostics.of_decision(
        program_of(model),
        expected.rolled,
        expected.decision,
        torch.zeros_like(expected.rolled["log_probs"]),
        None,
    )
    assert learned.kept == int(counts["kept tokens"])
    assert learned.rows == int(counts["kept rows"]) == int(expected.decision.kept)
    assert learned.tokens >= int(counts["tokens differentiated"])  # padding of packs


@by_name(EVERY)
def test_the_plain_path_has_the_same_gradient(arm):
    model, parameters = tiny(torch.float64)
    expected = stacked_gradient(arm, program_of(model), parameters)
    learned, found = plain(arm, model, parameters)
    same_gradient(found, expected)
    assert_close(learned.loss, expected.loss)
    assert learned.tokens == ROWS * (PROMPT_LENGTH + ANSWER_LENGTH)


@by_name([each for each in EVERY if each.unit == "sequence"])
def test_rows_without_weight_or_advantage_can_be_left_out_of_the_plain_path(arm):
    model, parameters = tiny(torch.float64)
    expected = stacked_gradient(arm, program_of(model), parameters)
    learned, found = plain(arm, model, parameters, filtered=True)
    same_gradient(found, expected)
    assert_close(learned.loss, expected.loss)
    kept = expected.weight.any(dim=1) & (expected.decision.advantages[0, :, 0] != 0)
    assert learned.rows == int(kept.sum()) < ROWS


@by_name([each for each in EVERY if each.kind == "budget"])
def test_the_product_keeps_to_a_budget_and_buys_no_less_delight(arm):
    model, parameters = tiny(torch.float64)
    expected = stacked_gradient(arm, program_of(model), parameters)
    learned, _ = product(arm, model, parameters, max_tokens=1)  # a row per pack
    num_tokens = int(expected.rolled["mask"].sum())
    assert 0 < learned.tokens <= arm.rate * (num_tokens + ROWS * PROMPT_LENGTH)
    # Its loss is minus U log pi over the batch's tokens: the delight bought, up to that number.
    chi = expected.decision.advantages[0] * -expected.rolled["log_probs"][0]
    bought = float((expected.weight * chi).sum())
    assert learned.loss * num_tokens >= bought * (1 - 1e-9)


def test_an_exact_screen_decides_by_the_policy_and_not_by_what_was_recorded():
    model, parameters = tiny(torch.float64)
    rolled, _, _ = experience(program_of(model), parameters)
    wrong = rolled | {"log_probs": torch.where(rolled["mask"], -1.0, 0.0).double()}
    found = {}
    for screen, what in (("free", rolled), ("exact", wrong), ("free", wrong)):
        arm = dataclasses.replace(KEPT, screen=screen)
        _, gradient = product(arm, model, parameters, 1 << 20, what)
        found[screen, what is wrong] = gradient["head"]
    assert_close(found["exact", True], found["free", False])
    assert (found["free", True] - found["free", False]).abs().max() > 1e-3


@pytest.mark.parametrize("eta", [None, 0.5])
def test_a_gate_for_everything_keeps_zero_delight_too(eta):
    delight, mask = torch.tensor([0.0, 1.0, -2.0, 5.0]), torch.tensor([True, True, True, False])
    out = Everything(eta)(delight, mask)
    assert torch.equal(out.keep, mask)
    expected = torch.ones(4) if eta is None else torch.sigmoid(delight / 0.5)
    assert_close(out.weight, expected * mask)
    assert float(out.rate) == 1.0


def test_training_on_what_is_kept_learns_the_task():
    one = learner(learning_rate=2e-2)
    before = one.evaluate()["held-out reward"]
    found = train(one, context(), part="echo", num_steps=60, log_steps=[30], evaluate_steps=[0, 60])
    records = lines_of(found)
    held_out = {r.step: r.value for r in records if r.metric == "held-out reward"}
    assert held_out == {0: before, 60: one.evaluate()["held-out reward"]}
    assert held_out[60] > 0.9 > 0.6 > held_out[0]


def context(tmp=None, *, stop_after=math.inf):
    calls = []

    def stopped():
        calls.append(None)
        return len(calls) >= stop_after

    checkpoint = Path("/nowhere/to/be/found") if tmp is None else tmp / "checkpoint.pt"
    return Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=stopped,
        checkpoint=checkpoint,
    )


def without_seconds(records):
    return keeping(records, lambda row, metric: not metric.startswith("seconds"))


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LOOK_EVERY", 1)  # it stops between two logged steps
    trained = partial(train, part="echo", num_steps=7, log_steps=[2, 5], evaluate_steps=[0, 7])
    expected = trained(learner(), context())
    with pytest.raises(Stopped):
        trained(learner(), context(tmp_path, stop_after=4))
    records = trained(learner(), context(tmp_path))
    assert without_seconds(records) == without_seconds(expected)
    assert [row["step"] for row in records[0].curve] == [0, 2, 5, 7]


def test_records_say_what_was_paid():
    found = train(learner(DENSE, setting=0.5), context(), part="p", num_steps=2, log_steps=[1])
    records = lines_of(found)
    values = {(r.step, r.metric): r.value for r in records}
    assert values[2, "rows differentiated"] == 64
    assert values[2, "kept tokens"] == 32 * values[2, "completion length"]
    generated = values[1, "kept tokens"] + values[2, "kept tokens"]
    assert values[2, "tokens generated"] == generated
    assert values[2, "tokens differentiated"] >= generated + 64 * PROMPT_LENGTH
    for stage in (*timed_step.STAGES, timed_step.LEARNER, timed_step.LOOP):
        assert values[2, f"seconds {stage}"] >= values[1, f"seconds {stage}"] >= 0
    parts = sum(
        values[2, f"seconds {stage}"] for stage in ("generate", "reward", timed_step.LEARNER)
    )
    assert parts <= values[2, "seconds loop"]
    learning = ("screen", "select", "train", "optimiser")
    assert sum(values[2, f"seconds {stage}"] for stage in learning) <= values[2, "seconds learner"]
    last = records[-1]
    assert (last.series, last.setting, last.seed, last.step) == ("PG", 0.5, 0, 2)
    assert (last.forward, last.backward) == (64, 64)


def test_a_step_in_which_all_are_paid_the_same_differentiates_nothing():
    one = learner(DENSE)
    for arm in (KEPT, text_arm(name="filter", gate=language_arms.FILTER)):
        one.program.task = Free()
        one.arm = arm
        before = [p.clone() for p in one.module.parameters()]
        done = one.step()
        assert done.learned.kept == done.learned.tokens == 0
        assert done.means["gradient norm"] == done.means["mixed groups"] == 0
        assert all(map(torch.equal, before, one.module.parameters()))
    assert one.totals["empty steps"] == 2
    assert {state["step"].item() for state in one.optimiser.state.values()} == {2}


@by_name(EVERY)
def test_a_run_is_that_of_a_populations_member_of_its_seed(arm):
    model, parameters = tiny(torch.float64, seeds=(0, 1))
    own, program = member(arm, seed=1, learning_rate=1e-2), program_of(model, max_norm=0.05)
    start, cpu = Start((0, 1), parameters), torch.device("cpu")
    population = Population(program, [own], device=cpu, dtype=torch.float64, start=start)
    one = Learner(program, start.of([1]), own)
    # Answers to one prompt share the entropy of their first token, and such ties are drawn by its
    # bits: once the weights differ by rounding, another of the four is kept.
    for _ in range(1 if "entropy" in arm.name else 3):
        population.step()
        one.step()
    expected = model.as_module(population.parameters, 0)
    for ours, its in zip(one.module.parameters(), expected.parameters(), strict=True):
        assert_close(ours, its, torch.float32)  # rewards and advantages are of this precision
    values = population.read()
    assert values["tokens generated"] == [one.totals["tokens generated"]]
    assert {k: v.item() for k, v in population.evaluate().items()} == one.evaluate()


def test_a_warm_up_leaves_no_trace():
    warm, cold = learner(), learner()
    warm.warm_up()
    assert warm.totals == {}
    warm.step()
    cold.step()
    assert all(map(torch.equal, warm.module.parameters(), cold.module.parameters()))


def test_all_arms_are_timed_on_the_same_experience_and_the_policy_stays():
    one = learner(DENSE, learning_rate=0.0)
    before = [p.clone() for p in one.module.parameters()]
    found = seconds_per_step(one, [DENSE, KEPT], rounds=3)
    assert all(map(torch.equal, before, one.module.parameters()))
    assert (one.arm, one.path) == (DENSE, "product")
    assert one.num_steps == 3
    assert list(found) == ["PG", "DG-K 30%", "PG plain"]
    assert {len(steps) for steps in found.values()} == {3}
    tokens = {name: {step.learned.tokens for step in steps} for name, steps in found.items()}
    assert tokens["PG plain"] == {32 * (PROMPT_LENGTH + ANSWER_LENGTH)}
    assert max(tokens["DG-K 30%"]) < min(tokens["PG"])
    made = step_seconds.seconds_runs("seconds", found, one)
    metrics = {(run.arm, name): value for run in made for name, value in run.curve[0].items()}
    for name, steps in found.items():
        for stage in (*timed_step.STAGES, timed_step.LEARNER, timed_step.LOOP):
            low, middle, high = (metrics[name, f"seconds {stage} p{p}"] for p in (20, 50, 80))
            assert 0 <= low <= middle <= high
            assert middle == sorted(step.seconds[stage] for step in steps)[1]
        assert metrics[name, "seconds loop p50"] > 0
    assert_close(
        metrics["PG", "tokens differentiated"],
        sum(step.learned.tokens for step in found["PG"]) / 3,
    )


def test_what_cannot_be_right_is_refused():
    model, two = tiny(seeds=(0, 1))
    with pytest.raises(ValueError, match="parameters must be those of one member"):
        Learner(program_of(model), two, member(DENSE))
    with pytest.raises(ValueError, match="learning_rate must be 0"):
        seconds_per_step(learner(), [DENSE], rounds=1)
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        seconds_per_step(learner(learning_rate=0.0), [DENSE], rounds=0)
    with pytest.raises(ValueError, match="repeats must be >= 2"):
        Shape(repeats=1)
    with pytest.raises(ValueError, match="num_prompts must be >= 1"):
        Shape(num_prompts=0)
    with pytest.raises(ValueError, match="max_norm must be > 0"):
        Shape(max_norm=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("compiled", [False, True])
@by_name([DENSE, KEPT])
def test_on_a_gpu_a_captured_loop_learns_too(arm, compiled):
    model, parameters = tiny()
    parameters = {name: value.cuda() for name, value in parameters.items()}
    own = member(arm, learning_rate=2e-2)
    one = Learner(program_of(model, num_held_out=64), parameters, own, compiled=compiled)
    one.warm_up()
    before = one.evaluate()["held-out reward"]
    for _ in range(80):
        one.step()
    assert one.evaluate()["held-out reward"] > max(0.8, before)


def test_a_restarted_learner_makes_the_run_of_a_fresh_one():
    fresh, other = learner(seed=1, learning_rate=3e-2), learner(seed=0)
    for _ in range(3):
        other.step()
    _, parameters = tiny()
    other.restart(parameters, member(KEPT, seed=1, learning_rate=3e-2))
    assert other.num_steps == 0
    assert torch.equal(other.evaluate()["held-out reward"], fresh.evaluate()["held-out reward"])
    for _ in range(3):
        fresh.step()
        other.step()
    for ours, its in zip(fresh.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, its)
    assert other.totals["tokens differentiated"] == fresh.totals["tokens differentiated"]
    assert other.members == fresh.members


def test_a_learner_restarts_with_its_own_arm_only():
    with pytest.raises(ValueError, match="learner's arm, 'DG-K 30%', got 'PG'"):
        learner().restart(tiny()[1], member(DENSE))


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"frictions": Frictions(refresh=2)}, "no friction"), ({"decay_steps": 3}, "decay_steps=0")],
)
def test_what_only_populations_do_is_refused(changes, told):
    own = dataclasses.replace(member(KEPT), **changes)
    model, parameters = tiny()
    with pytest.raises(ValueError, match=told):
        Learner(program_of(model), parameters, own)
    with pytest.raises(ValueError, match=told):
        learner().restart(parameters, own)


def test_a_run_ends_where_it_is_enough(tmp_path):
    asked = []

    def enough(history):
        asked.append(history[-1]["step"])
        return len(history) == 3

    own = Context(
        device=torch.device("cpu"),
        progress=lambda share, note: None,
        stopped=lambda: False,
        checkpoint=tmp_path / "x",
    )
    found = train(
        learner(),
        own,
        part="p",
        num_steps=9,
        log_steps=(1,),
        evaluate_steps=[0, 2, 5],
        enough=enough,
    )
    assert asked == [2]  # after evaluated steps alone; by then 0, 1 and 2 were logged
    assert max(row["step"] for row in found[0].curve) == 2


def test_the_likeliest_answers_are_measured_where_asked_for():
    model, parameters = tiny()
    for greedy in (True, False):
        own = Learner(program_of(model, greedy=greedy), parameters, member(KEPT))
        assert ("held-out reward" in own.evaluate()) == greedy
        assert "held-out sampled reward" in own.evaluate()


def test_dense_arms_are_timed_by_the_paths_asked_for():
    own = learner(learning_rate=0.0)
    found = seconds_per_step(own, [DENSE, KEPT], rounds=1, dense_paths=("plain",))
    assert set(found) == {"PG plain", "DG-K 30%"}
