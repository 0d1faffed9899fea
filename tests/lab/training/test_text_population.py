import dataclasses
import functools
import math

import pytest
import torch

import kondo
from kondo import signals
from kondo.lm import BudgetGate
from kondo_lab.models.architecture import compute_dtype
from kondo_lab.models.sampler import sample
from kondo_lab.tasks.draws import Draws
from kondo_lab.tasks.text import NUM_TOKENS, make
from kondo_lab.training import decisions, run
from kondo_lab.training.diagnostics import TOTALS
from kondo_lab.training.gates import DrawnVarianceGate, Everything
from kondo_lab.training.language_arms import CLIPPED, FILTER, text_arm
from kondo_lab.training.part import Context, Stopped
from kondo_lab.training.population import Population
from kondo_lab.training.programs import Shape, TextProgram
from kondo_lab.training.run import train
from kondo_lab.training.supervised import mean_reward, warm_start
from kondo_lab.training.text_signals import entropy
from lab.made_up import lines_of, table_of
from lab.training import language_toys as toys
from lab.training.language_toys import member, warmed
from lab.training.toys import HostIsBlind
from tolerances import assert_close

GRPO = {"loss": CLIPPED, "divided": True}
by = functools.partial(kondo.Gate, rate=0.25)
PG = text_arm(name="PG")
KEPT = text_arm(name="DG-K", gate=kondo.Gate(rate=0.25))
RANDOM = text_arm(name="random", gate=by(signal=signals.uniform), denominator="kept")
EVERY = [
    PG,
    KEPT,
    text_arm(name="GRPO", **GRPO),
    text_arm(name="DG", gate=Everything(0.5), unit="token"),
    text_arm(name="DG-K exact", gate=kondo.Gate(rate=0.25), screen="exact"),
    text_arm(name="DG-K tokens", gate=kondo.Gate(rate=0.25), unit="token"),
    RANDOM,
    text_arm(name="entropy", gate=by(signal=entropy), unit="token"),
    text_arm(name="PODS", gate=DrawnVarianceGate(rate=0.25), **GRPO),
    text_arm(name="filter", gate=FILTER, **GRPO),
    text_arm(name="budget", gate=BudgetGate(budget=0.25)),
]
MEANS = {
    *("train reward", "entropy", "mixed groups", "completion length"),
    *("delight q05", "delight q50", "delight q95"),
    *("kept rows", "kept tokens", "kept delight share"),
    *("gradient norm", "effective sample size"),
}


def members(several=(PG, KEPT), seeds=(0, 1)):
    return [
        member(each, seed=seed, learning_rate=1e-3 * (seed + 1), setting=seed / 2)
        for each in several
        for seed in seeds
    ]


def made(own_members=None, **options):
    return toys.population(members() if own_members is None else own_members, **options)


def alone(own_population, number):
    """Return the parameters of a member, as [1, ...]."""
    return {name: value[[number]] for name, value in own_population.parameters.items()}


def by_hand(own, num_steps, *, max_norm=1.0):
    """Train one member with torch's Adam on all its rows, nothing gathered; [1, ...] each."""
    program, draws = toys.program(), Draws([own.seed])
    model, task = program.network, program.task
    start = warmed().of([own.seed])
    leaves = {name: value.double().requires_grad_() for name, value in start.items()}
    adam = torch.optim.Adam(leaves.values(), lr=own.learning_rate)
    for step in range(1, num_steps + 1):
        prompts = task.prompts(draws, "prompts", step, 6)
        sampled = sample(model, leaves, prompts, repeats=4, draws=draws, step=step)
        rewards = task.reward(prompts.repeat_interleave(4, 1), sampled.completions)
        rolled = sampled._asdict() | {"rewards": rewards}
        decision = decisions.decide(program, own.arm, own.arm.gate, rolled, draws, step)
        new = model.log_prob(leaves, sampled.tokens)
        adam.zero_grad()
        found = decisions.loss(program, own.arm, new, rolled, decision, None)
        found.sum().backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), max_norm)
        adam.step()
    return leaves


@pytest.mark.parametrize("arm", EVERY, ids=lambda each: each.name)
def test_a_member_trains_as_by_hand(arm):
    # Completions of a prompt have equal entropies at their first token, and who of them is kept is
    # drawn by the last bits: they must be equal too, so members are alone and step but once.
    num_steps = 1 if arm.name == "entropy" else 3
    for own in members([arm]):
        trained = made([own], dtype=torch.float64)
        for _ in range(num_steps):
            trained.step()
        expected, before = by_hand(own, num_steps), warmed().of([own.seed])
        assert not torch.equal(expected["head"].float(), before["head"])
        for name, value in trained.parameters.items():
            assert_close(value, expected[name])


def test_gradients_are_clipped_member_by_member():
    trained = made([member(PG, seed=0), member(PG, seed=1)], dtype=torch.float64, max_norm=1e-3)
    for _ in range(2):
        trained.step()
    for number, own in enumerate(trained.members):
        expected = by_hand(own, 2, max_norm=1e-3)
        for name, value in alone(trained, number).items():
            assert_close(value, expected[name])
    assert min(trained.read()["gradient norm"]) > 1e-3


@pytest.mark.parametrize("max_tokens", [1, 250, 1 << 20])
def test_a_member_is_the_same_in_any_company_and_group(max_tokens):
    together = made(members(EVERY), dtype=torch.float64, max_tokens=max_tokens)
    for _ in range(3):
        together.step()
    for arm in (KEPT, RANDOM):
        apart = made([member(arm, seed=1, learning_rate=2e-3)], dtype=torch.float64)
        for _ in range(3):
            apart.step()
        number = [(own.arm, own.seed) for own in together.members].index((arm, 1))
        for name, value in apart.parameters.items():
            assert_close(together.parameters[name][[number]], value)
    sizes = [group.members.stop - group.members.start for group in together.groups]
    assert sum(sizes) == len(together.members)
    assert set(sizes) == {1 if max_tokens == 1 else 2} or max_tokens == 250


def name_of(group):
    """The name of the arm whose members the group holds."""
    (rule,) = group.rules
    assert rule.members == group.members
    return rule.arm.name


def test_a_group_holds_as_many_members_as_fit():
    own_members = [member(KEPT, seed=s % 2, setting=s) for s in range(5)]
    own_members += [member(PG, seed=s % 2, setting=s) for s in range(5)]
    # Rows of 5 tokens: 6 kept ones are 30 tokens of a member, all 24 are 120.
    trained = made(own_members, max_tokens=250)
    groups = [(name_of(group), group.members) for group in trained.groups]
    assert groups == [
        ("DG-K", slice(0, 5)),
        ("PG", slice(5, 7)),
        ("PG", slice(7, 9)),
        ("PG", slice(9, 10)),
    ]


def test_only_kept_rows_go_through_a_training_forward(monkeypatch):
    trained = made(members(EVERY, seeds=[0]))
    shapes, scored = [], []
    model = trained.program.network
    own_log_prob = model.log_prob

    def log_prob(parameters, tokens):
        (shapes if torch.is_grad_enabled() else scored).append(tuple(tokens.shape))
        return own_log_prob(parameters, tokens)

    monkeypatch.setattr(model, "log_prob", log_prob)
    trained.step()
    found = {name_of(group): shape[1] for group, shape in zip(trained.groups, shapes, strict=True)}
    few = {"DG-K", "DG-K exact", "random", "PODS"}
    assert found == {each.name: 6 if each.name in few else 24 for each in EVERY}
    assert scored == [(1, 24, 5)]  # the exact screen, of all its rows


def test_metrics_are_those_counted_by_hand():
    trained = made(members([PG, KEPT]), dtype=torch.float64)
    expected = [[] for _ in trained.members]
    for _ in range(3):
        trained.step()
        rolled = trained.rolled
        for number, own in enumerate(trained.members):
            mask, paid = rolled["mask"][number], rolled["rewards"][number]
            groups = paid.view(6, 4)
            centred = (groups - groups.mean(dim=1, keepdim=True)).flatten()
            delight = -(rolled["log_probs"][number].sum(dim=1)) * centred
            ranked = delight.sort().values
            worth = delight.clamp(min=0)  # of a completion all tokens have the sign of its U
            kept = torch.ones(24, dtype=torch.bool)
            if own.arm is KEPT:
                count = min(6, int((delight != 0).sum()))
                kept = torch.zeros(24, dtype=torch.bool)
                kept[torch.where(delight == 0, -math.inf, delight).topk(count).indices] = True
            expected[number].append(
                {
                    "train reward": paid.mean(),
                    "entropy": rolled["entropies"][number][mask].mean(),
                    "mixed groups": sum(len(set(g.tolist())) > 1 for g in groups) / 6,
                    "completion length": mask.sum(dim=1).double().mean(),
                    "delight q05": ranked[1],
                    "delight q50": ranked[12],
                    "delight q95": ranked[22],
                    "kept rows": kept.sum(),
                    "kept tokens": mask[kept].sum(),
                    "kept delight share": worth[kept].sum() / worth.sum() if worth.any() else 0,
                    "tokens generated": mask.sum(),
                    "tokens differentiated": mask[kept].sum() + 2 * kept.sum(),
                }
            )
    found, paid = trained.read(), trained.read_backward()
    assert set(found) == {*MEANS, *TOTALS}
    for number, steps in enumerate(expected):
        for metric in steps[0]:
            total = sum(float(values[metric]) for values in steps)
            wanted = total if metric in TOTALS else total / 3
            assert_close(found[metric][number], wanted, dtype=torch.float32)
        assert paid[number] == sum(int(values["kept rows"]) for values in steps)


def test_means_start_anew_when_read_and_totals_go_on():
    trained = made(members([PG], seeds=[0]))
    trained.step()
    first = trained.read()
    trained.step()
    second = trained.read()
    assert_close(
        second["train reward"][0], float(trained.rolled["rewards"].mean()), dtype=torch.float32
    )
    generated = first["tokens generated"][0] + float(trained.rolled["mask"].sum())
    assert second["tokens generated"] == [generated]


def test_evaluations_are_of_held_out_prompts_and_change_nothing():
    trained, other = made(), made()
    found = trained.evaluate()
    program = trained.program
    inputs = (program.network, trained.parameters, program.task, trained.draws, 20)
    assert torch.equal(found["held-out reward"], mean_reward(*inputs, greedy=True))
    assert torch.equal(found["held-out sampled reward"], mean_reward(*inputs))
    trained.step()
    other.step()
    for name, value in trained.parameters.items():
        assert torch.equal(value, other.parameters[name])


def test_the_host_is_not_asked_by_a_step(monkeypatch):
    monkeypatch.setattr(kondo, "select", toys.select_as_on_a_gpu)
    trained = made(members(EVERY))
    with HostIsBlind():
        trained.step()


def test_rewards_rise():
    own_members = [member(each, seed=s, learning_rate=3e-3) for each in (PG, KEPT) for s in (0, 1)]
    trained = made(own_members, num_prompts=16)
    before = trained.evaluate()["held-out sampled reward"]
    for _ in range(60):
        trained.step()
    after = trained.evaluate()["held-out sampled reward"]
    assert (after > before + 0.2).all()
    assert (after > 0.8).all()


class User:
    """Watches the progress, and stops after a share of the work."""

    def __init__(self, stop_at=math.inf):
        self.stop_at = stop_at
        self.shares, self.notes = [], []

    def progress(self, share, note):
        self.shares.append(share)
        self.notes.append(note)

    def stopped(self):
        return self.shares[-1] >= self.stop_at


def context(tmp_path, user=None, device=toys.CPU):
    user = user or User()
    return Context(
        device=device,
        progress=user.progress,
        stopped=user.stopped,
        checkpoint=tmp_path / "part.pt",
    )


def test_records_say_who_when_and_at_what_cost(tmp_path):
    user, trained = User(), made()
    found = train(
        trained,
        context(tmp_path, user),
        part="p",
        num_steps=5,
        log_steps=[2],
        evaluate_steps=[0, 3],
    )
    table = table_of(found, part="p")
    held_out = {"held-out reward", "held-out sampled reward"}
    logged = {*MEANS, *TOTALS}
    by_step = {step: set(of_step["metric"]) for step, of_step in table.groupby("step")}
    assert by_step == {0: held_out, 2: logged, 3: logged | held_out, 5: logged}
    assert (table["forward"] == 24 * table["step"]).all()
    dense = table[table["series"] == "PG"]
    assert (dense["backward"] == dense["forward"]).all()
    kept = table[table["series"] == "DG-K"]
    assert (kept["backward"] <= 6 * kept["step"]).all()
    assert set(zip(table["series"], table["seed"], table["setting"], strict=True)) == {
        (own.series, own.seed, own.setting) for own in trained.members
    }
    assert user.shares == [0.4, 0.6, 1.0]
    assert user.notes[-1].startswith("mean train reward ")
    assert not (tmp_path / "part.pt").exists()


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch, device):
    monkeypatch.setattr(run, "LOOK_EVERY", 2)
    plan = {"part": "p", "num_steps": 9, "log_steps": [1, 5], "evaluate_steps": [0, 6]}
    own_members = members(EVERY[:6])
    whole = train(made(own_members, device=device), context(tmp_path, device=device), **plan)
    stopping = context(tmp_path, User(stop_at=0.4), device)
    with pytest.raises(Stopped):
        train(made(own_members, device=device), stopping, **plan)
    assert (tmp_path / "part.pt").exists()
    resumed = train(made(own_members, device=device), context(tmp_path, device=device), **plan)
    if device.type == "cpu":
        assert resumed == whole
    else:  # a GPU may take another kernel for a replay than for a first call
        for one, other in zip(lines_of(resumed), lines_of(whole), strict=True):
            assert (one[:6], one.metric) == (other[:6], other.metric)


def test_long_runs_are_saved_on_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", -1.0)
    train(made(), context(tmp_path), part="p", num_steps=3, log_steps=[1, 2])
    saved = torch.load(tmp_path / "part.pt", weights_only=True)
    assert saved["populations"][0]["num_steps"] == 2


def test_populations_train_side_by_side(tmp_path):
    apart = [made(members([each])) for each in (PG, KEPT)]
    plan = {"part": "p", "num_steps": 3, "log_steps": [1]}
    found = train(apart, context(tmp_path), **plan)
    expected = train(made(members([PG, KEPT])), context(tmp_path), **plan)

    def key(record):
        return (record.metric, record.series, record.seed, record.step)

    both = (sorted(lines_of(each), key=key) for each in (found, expected))
    for one, other in zip(*both, strict=True):
        assert key(one) == key(other)
        assert_close(one.value, other.value, dtype=torch.float32)


def test_a_text_task_trains_from_end_to_end(tmp_path):
    task = make("addition", 1)
    model = toys.model(
        prompt_length=task.prompt_length, answer_length=task.answer_length, num_tokens=NUM_TOKENS
    )
    start, _ = warm_start(
        model, task, [0], num_steps=3, batch=8, learning_rate=1e-2, device=toys.CPU
    )
    program = TextProgram(task, model, Shape(num_prompts=2, repeats=4, num_held_out=8))
    own_members = [member(each) for each in (PG, KEPT)]
    trained = Population(program, own_members, device=toys.CPU, start=start)
    found = train(
        trained, context(tmp_path), part="p", num_steps=2, log_steps=[], evaluate_steps=[2]
    )
    assert all(math.isfinite(line.value) for line in lines_of(found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_steps_on_a_device_are_those_on_the_cpu():
    device = torch.device("cuda")
    # Equal entropies are drawn by their last bits, which differ between devices.
    own_members = members([each for each in EVERY if each.name != "entropy"])
    here, there = made(own_members), made(own_members, device=device)
    for _ in range(6):
        here.step()
        there.step()
        assert torch.equal(there.rolled["tokens"].cpu(), here.rolled["tokens"])
        for name, value in there.parameters.items():
            # Adam divides by the size of gradients that are rounded differently.
            assert_close(value, here.parameters[name], dtype=torch.float16)
            value.copy_(here.parameters[name])
    assert there.read_backward() == here.read_backward()
    assert there._begin._graph is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_half_precision_on_a_device_learns():
    device = torch.device("cuda")
    model = toys.model(dtype=compute_dtype(device))
    own_members = [member(each, seed=s, learning_rate=3e-3) for each in (PG, KEPT) for s in (0, 1)]
    program = toys.program(own_model=model, num_prompts=16)
    trained = Population(program, own_members, device=device, start=warmed())
    for _ in range(60):
        trained.step()
    assert (trained.evaluate()["held-out sampled reward"] > 0.8).all()


def test_members_must_not_be_empty():
    with pytest.raises(ValueError, match="members must not be empty"):
        made([])


@pytest.mark.parametrize("name", ["prompt_length", "answer_length"])
def test_a_model_of_another_length_is_refused(name):
    model = toys.model(**{name: 7})
    with pytest.raises(ValueError, match=f"model must have the task's {name}, [23], got 7"):
        TextProgram(toys.Echo(), model, Shape())


def test_more_rows_than_a_gpu_counts_are_refused():
    cuda = torch.device("cuda")
    toys.program(num_prompts=1, repeats=5).check_rows(13_107, cuda)  # 65535 rows
    many = toys.program(num_prompts=1, repeats=4)
    many.check_rows(16_384, toys.CPU)
    with pytest.raises(ValueError, match=r"at most 65535 rows together on a GPU.*got 65536"):
        many.check_rows(16_384, cuda)


def test_members_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        member(PG).seed = 3
