"""`KondoTrainer` walks the original's path, on the rows it kept alone."""

import copy
from types import SimpleNamespace

import kondo_gate as original
import pytest
import torch
from torch import nn

import kondo
from kondo.integrations import kondo_gate as ours
from tolerances import assert_close

ROWS, TOKENS, VOCAB = 9, 4, 7


class Policy(nn.Module):
    """A recurrent model with `.logits`, [B, T, V], or [B, V] of the mean over what counts.

    Counts the rows that enter a forward without and with a graph, and a backward.
    """

    def __init__(self, pooled=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.recur = nn.GRU(6, 8, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCAB)
        self.pooled = pooled
        self.rows = {"screen": 0, "forward": 0, "backward": 0}

    def forward(self, input_ids, attention_mask=None):
        self.rows["forward" if torch.is_grad_enabled() else "screen"] += input_ids.shape[0]
        hidden = self.drop(self.recur(self.embed(input_ids))[0])
        if self.pooled:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            hidden = (hidden * mask.unsqueeze(-1)).mean(1)
        logits = self.head(hidden)
        if logits.requires_grad:
            logits.register_hook(self._count)
        return SimpleNamespace(logits=logits)

    def _count(self, gradient):
        self.rows["backward"] += gradient.shape[0]


def make_policy(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Policy(**options).to(dtype)


def make_batch(step, *, mask=None, dtype=torch.float64, pooled=False):
    """Return the step's keyword arguments; `mask` is None or a dtype, padded at the end."""
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS,) if pooled else (ROWS, TOKENS)
    batch = {
        "input_ids": torch.randint(VOCAB, (ROWS, TOKENS), generator=generator),
        "actions": torch.randint(VOCAB, shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator, dtype=dtype),
        "attention_mask": None,
    }
    if mask is not None:
        lengths = torch.randint(TOKENS + 1, (ROWS, 1), generator=generator)  # some rows are empty
        batch["attention_mask"] = (torch.arange(TOKENS) < lengths).to(mask)
    return batch


def step_both(trainers, batch, seed=0):
    """Step both trainers from the same random state; fail unless they agree; return the stats."""
    results = []
    for trainer in trainers:
        torch.manual_seed(seed)
        results.append(trainer.step(**batch))
    got, expected = results
    assert list(got) == list(expected)
    dtype = next(trainers[0].model.parameters()).dtype
    for key, value in expected.items():
        assert isinstance(got[key], float)
        assert_close(got[key], value, dtype)
    assert_same_parameters(*trainers)
    return got


def assert_same_parameters(one, other):
    pairs = zip(one.model.named_parameters(), other.model.named_parameters(), strict=True)
    for (_, got), (_, expected) in pairs:
        assert_close(got, expected)


def make_trainers(policy, optimizer=None, **options):
    trainers = []
    for module in (ours, original):
        model = copy.deepcopy(policy)
        built = None if optimizer is None else optimizer(model.parameters())
        trainers.append(module.KondoTrainer(model, optimizer=built, **options))
    return trainers


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def rows_with_gradient(trainer, batch):
    """Return how many rows the original's gate keeps and whose advantages are not all zero."""
    model = copy.deepcopy(trainer.model).eval()
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        gate = original.KondoGate(original.KondoGateConfig(**vars(trainer.gate.config)))
        weights = gate(
            logits, batch["actions"], batch["advantages"], batch["attention_mask"]
        ).gate_weights
    gated = weights.reshape(ROWS, -1) * batch["advantages"].reshape(ROWS, -1)
    if batch["attention_mask"] is not None and gated.shape[1] > 1:
        gated = gated * batch["attention_mask"]
    return int((gated != 0).any(1).sum())


MODES = {
    "default": {},
    "low rate": {"gate_rate": 0.03},
    "everything": {"gate_rate": 1.0},
    "price": {"price": 0.5},
    "price nothing reaches": {"price": 1e6},
    "stochastic": {"gate_rate": 0.2, "deterministic": False},
    "stochastic price": {"price": 0.0, "deterministic": False, "temperature": 1.0},
    "soft": {"hard": False, "temperature": 1.0},
    "soft price": {"hard": False, "price": 0.2},
}
UNITS = {
    "token": {},
    "row": {"mask": torch.int64},
    "sample": {"pooled": True},
    "sample with mask": {"pooled": True, "mask": torch.int64},
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("mode", MODES)
def test_path_is_the_originals(mode, unit):
    policy = make_policy(pooled=UNITS[unit].get("pooled", False))
    trainers = make_trainers(policy, adam, **MODES[mode])
    for step in range(12):
        step_both(trainers, make_batch(step, **UNITS[unit]), seed=step)
    moved = (trainers[0].model.head.weight - policy.head.weight).abs().max()
    assert (moved > 0) == (mode != "price nothing reaches")


@pytest.mark.parametrize("mode", ["default", "stochastic", "soft"])
def test_path_in_float32_with_the_default_optimizer(mode):
    trainers = make_trainers(make_policy(torch.float32), **MODES[mode])
    for step in range(12):
        step_both(trainers, make_batch(step, dtype=torch.float32, mask=torch.float32), seed=step)


def changed(batch, how):
    """Return a batch of an unusual kind that the original takes."""
    generator = torch.Generator().manual_seed(5)
    advantages = batch["advantages"]
    ternary = torch.randint(-1, 2, advantages.shape, generator=generator)
    weights = torch.rand(ROWS, TOKENS, generator=generator).round(decimals=1)
    return (
        batch
        | {
            "ties": {"advantages": ternary.double()},
            "integer advantages": {"advantages": ternary},
            "one advantage per row": {"advantages": advantages[:, :1]},
            "zero advantages": {"advantages": torch.zeros_like(advantages)},
            "rows of zero advantage": {
                "advantages": advantages * (torch.arange(ROWS) % 2)[:, None]
            },
            "opposite advantages": {"advantages": advantages[:, :1] * torch.tensor([1, -1, 1, -1])},
            "bool mask": {"attention_mask": torch.rand(ROWS, TOKENS, generator=generator) < 0.5},
            "full mask": {"attention_mask": torch.ones(ROWS, TOKENS)},
            "empty mask": {"attention_mask": torch.zeros(ROWS, TOKENS)},
            "weights as mask": {"attention_mask": weights},
            "advantages with a graph": {"advantages": advantages.clone().requires_grad_()},
        }[how]
    )


UNUSUAL = [
    "ties",
    "integer advantages",
    "one advantage per row",
    "zero advantages",
    "rows of zero advantage",
    "opposite advantages",
    "bool mask",
    "full mask",
    "empty mask",
    "weights as mask",
    "advantages with a graph",
]


@pytest.mark.parametrize("mask", [None, torch.float32])
@pytest.mark.parametrize("how", UNUSUAL)
@pytest.mark.parametrize("mode", ["default", "stochastic"])
def test_unusual_batches_take_the_originals_path(mode, how, mask):
    trainers = make_trainers(make_policy(), momentum, **MODES[mode])
    for step in range(4):  # ordinary, unusual, ordinary, unusual
        batch = make_batch(step, mask=mask)
        step_both(trainers, changed(batch, how) if step % 2 else batch, seed=step)


def test_hugging_face_model_takes_the_originals_path():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    trainers = make_trainers(transformers.GPT2LMHeadModel(config).double(), adam)
    for step in range(10):
        batch = make_batch(step, mask=torch.int64)
        batch["attention_mask"][:, 0] = 1
        step_both(trainers, batch)
    assert 0 < trainers[0].last_report.rows_trained < ROWS


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "options", [{"gate_rate": 0.03}, {}, {"price": 1.0}, {"price": 0.0}], ids=str
)
def test_only_rows_with_a_kept_unit_are_differentiated(options, unit):
    trainer = ours.KondoTrainer(make_policy(pooled=UNITS[unit].get("pooled", False)), **options)
    batch = make_batch(3, **UNITS[unit])
    batch["advantages"][:3] = 0.0  # kept where they tie, but without a gradient
    expected = rows_with_gradient(trainer, batch)
    assert 0 < expected < ROWS
    trainer.step(**batch)
    assert trainer.model.rows == {"screen": ROWS, "forward": expected, "backward": expected}
    report = trainer.last_report
    assert isinstance(report, kondo.Report)
    assert (report.rows_seen, report.rows_trained, report.calls) == (ROWS, expected, 1)
    assert report.rate == report.kept / report.seen


def test_the_original_differentiates_every_row():
    """What the counts above are compared with."""
    trainer = original.KondoTrainer(make_policy(), gate_rate=0.03)
    trainer.step(**make_batch(3))
    assert trainer.model.rows == {"screen": 0, "forward": ROWS, "backward": ROWS}


@pytest.mark.parametrize("mode", ["everything", "soft", "soft price"])
def test_no_screen_is_paid_where_nothing_can_be_skipped(mode):
    trainer = ours.KondoTrainer(make_policy(), **MODES[mode])
    trainer.step(**make_batch(0))
    assert trainer.model.rows == {"screen": 0, "forward": ROWS, "backward": ROWS}
    assert trainer.last_report is None


@pytest.mark.parametrize("mask", [None, torch.int64])
def test_keeping_nothing_steps_on_zero_gradients(mask):
    """Adam's momentum moves the parameters, as in the original; one row pays for it."""
    trainers = make_trainers(make_policy(), adam, price=0.5)
    for step in range(3):
        step_both(trainers, make_batch(step, mask=mask))
    for trainer in trainers:
        trainer.gate.config.price = 1e6
    model = trainers[0].model
    model.rows = dict.fromkeys(model.rows, 0)
    before = model.head.weight.detach().clone()
    batch = make_batch(3, mask=mask)
    if mask is not None:
        batch["attention_mask"][0] = 0  # a model may give NaN there: another row is taken
    stats = step_both(trainers, batch)
    assert stats["loss"] == stats["gate_rate"] == 0.0
    assert bool((model.head.weight != before).any())
    assert all(bool((p.grad == 0).all()) for p in model.parameters())
    assert model.rows == {"screen": ROWS, "forward": 1, "backward": 1}
    report = trainers[0].last_report
    assert report.empty
    assert (report.rows_trained, report.calls) == (1, 1)
    longest = TOKENS if mask is None else int(batch["attention_mask"].sum(1).max())
    assert report.tokens_trained == longest


def test_reported_gate_rate_is_the_originals_though_zero_advantages_are_skipped():
    trainer = ours.KondoTrainer(make_policy())
    batch = changed(make_batch(0), "zero advantages")
    stats = trainer.step(**batch)
    assert stats["gate_rate"] == 1.0  # every unit ties at the price
    assert (trainer.last_report.kept, trainer.last_report.rows_trained) == (0, 1)


def test_unused_parameters_keep_no_gradient_where_nothing_is_kept():
    trainers = make_trainers(make_policy(), momentum, price=1e6)
    for trainer in trainers:
        trainer.model.spare = nn.Linear(2, 2).double()
        trainer.step(**make_batch(0))
        assert trainer.model.spare.weight.grad is None
        assert trainer.model.head.weight.grad is not None


def test_old_gradients_do_not_enter():
    trainers = make_trainers(make_policy(), adam)
    for trainer in trainers:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
    step_both(trainers, make_batch(0))


def test_screen_is_deterministic_under_dropout():
    policy = make_policy(dropout=0.5)
    stats = []
    for seed in (1, 2):
        trainer = ours.KondoTrainer(copy.deepcopy(policy))
        torch.manual_seed(seed)
        stats.append(trainer.step(**make_batch(0)))
        assert trainer.model.training
        assert trainer.model.drop.training
    for key in ("gate_rate", "price", "mean_delight"):
        assert stats[0][key] == stats[1][key]
    assert stats[0]["loss"] != stats[1]["loss"]  # dropout acts on the rows that are trained


def test_nan_names_the_unit():
    trainer = ours.KondoTrainer(make_policy())
    batch = make_batch(0)
    batch["advantages"][2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"advantages .* unit \(2, 1\)"):
        trainer.step(**batch)


class NanInPadding(Policy):
    """Attention over nothing can give NaN; here it always does."""

    def forward(self, input_ids, attention_mask=None):
        output = super().forward(input_ids, attention_mask)
        padding = (attention_mask == 0).unsqueeze(-1)
        return SimpleNamespace(logits=output.logits.masked_fill(padding, torch.nan))


def test_nan_in_padding_does_not_leak():
    batch = make_batch(0, mask=torch.float32)
    clean, dirty = (ours.KondoTrainer(make_policy()) for _ in range(2))
    dirty.model.__class__ = NanInPadding
    expected = clean.step(**batch)
    batch["advantages"][batch["attention_mask"] == 0] = torch.nan
    assert dirty.step(**batch) == expected
    assert_same_parameters(clean, dirty)


def test_report_counts_what_the_mask_says():
    trainer = ours.KondoTrainer(make_policy())
    batch = make_batch(0, mask=torch.int64)
    trainer.step(**batch)
    assert trainer.last_report.seen == int(batch["attention_mask"].any(1).sum()) < ROWS
    assert trainer.last_report.tokens_seen == int(batch["attention_mask"].sum())


def step_with_an_impossible_action(advantage, **options):
    """Step where the policy gives one taken action probability zero."""
    trainer = ours.KondoTrainer(make_policy(), **options)
    batch = make_batch(0)
    batch["actions"].clamp_(max=VOCAB - 2)
    with torch.no_grad():
        trainer.model.head.bias[VOCAB - 1] = -torch.inf
    batch["actions"][1, 2] = VOCAB - 1
    batch["advantages"][1, 2] = advantage
    trainer.step(**batch)
    return trainer


@pytest.mark.parametrize(
    ("advantage", "options"),
    [(1.0, {}), (1.0, {"price": 0.5}), (0.0, {})],  # 0 x inf is NaN, and so is any quantile
    ids=str,
)
def test_kept_action_of_probability_zero_is_an_error(advantage, options):
    with pytest.raises(ValueError, match="probability zero"):
        step_with_an_impossible_action(advantage, **options)


@pytest.mark.parametrize(("advantage", "options"), [(-1.0, {}), (0.0, {"price": 0.5})], ids=str)
def test_skipped_action_of_probability_zero_does_no_harm(advantage, options):
    trainer = step_with_an_impossible_action(advantage, **options)
    assert trainer.last_report.kept > 0
    for parameter in trainer.model.parameters():
        assert bool(parameter.grad.isfinite().all())


def test_custom_delight_is_gated_on():
    """A subclass of the gate may redefine delight, as with the original."""
    trainers = []
    for module in (ours, original):

        class Absolute(module.KondoGate):
            def compute_delight(self, log_probs, advantages):
                return super().compute_delight(log_probs, advantages).abs()

        trainer = module.KondoTrainer(make_policy(), optimizer=None, lr=0.02)
        trainer.gate = Absolute()
        trainers.append(trainer)
    for step in range(3):
        step_both(trainers, make_batch(step))
