"""The benchmark of TRL's trainers: it runs, its CSV has the schema, its checks can fail.

No time is asserted anywhere: the numbers of a shared machine prove nothing.
"""

import csv
import dataclasses
import gc
import importlib.util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
QUICK = ["--quick", "--rates", "3", "30", "--out"]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed"
)


@pytest.fixture
def bench(monkeypatch):
    """Import the script as its own command does: from its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process, not ours
    import bench_trl

    gc.collect()
    gc.freeze()  # trainers collect garbage; what was imported need not be looked at again
    yield bench_trl
    gc.unfreeze()


@pytest.fixture
def work(bench):
    options = bench.parse([*QUICK, "unused.csv"])
    return bench.build_workload(options, torch.device("cpu"))


def test_every_trainer_is_measured_and_counted(bench, tmp_path):
    path = tmp_path / "trl.csv"
    bench.main([*QUICK, str(path)])
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [field.name for field in dataclasses.fields(bench.TrlRow)]
    found = {(line["contender"], line["rate"]): line for line in lines}
    ours = [(screen, rate) for screen in ("rollout", "exact") for rate in ("0.03", "0.3")]
    assert set(found) == {("trl", "1"), *ours}
    counted = {
        key: (line["rows_differentiated"], line["tokens_trained"], line["tokens"])
        for key, line in found.items()
    }
    # 32 completions of 12 tokens, with prompts of 4.
    assert counted.pop(("trl", "1")) == ("32", "512", "512")
    for (_, rate), numbers in counted.items():
        assert numbers == {"0.03": ("1", "16", "512"), "0.3": ("10", "160", "512")}[rate]
    for key, line in found.items():
        assert line["tokens_screened"] == ("512" if key[0] == "exact" else "0")
        stages = dict(part.split("=") for part in line["stages"].split())
        gated = {"screen", "select", "forward", "backward"} if key in ours else set()
        assert set(stages) == {"score", "rest"} | gated
        assert 0 < float(line["learner_ms_p50"]) < float(line["step_ms_p50"])
        assert (line["limit"] == "") == (key not in ours)
    assert found["trl", "1"]["speedup_p50"] == found["trl", "1"]["learner_speedup_p50"] == "1"


def test_a_wrong_gradient_ends_the_run(bench, work, monkeypatch):
    monkeypatch.setattr(bench, "kept_rows", lambda work, rate: torch.arange(32) < 10)
    with pytest.raises(SystemExit, match="gradient of rollout is wrong"):
        bench.check_gradient(work, 0.3, bench.build_tokenizer(work.shape.vocabulary))


def test_a_gradient_of_another_scale_is_wrong(bench, work, monkeypatch):
    right = bench.gradient_of

    def doubled(work, contender, tokenizer, keep=None):
        factor = 1 if contender.name == "trl" else 2
        return [factor * gradient for gradient in right(work, contender, tokenizer, keep)]

    monkeypatch.setattr(bench, "gradient_of", doubled)
    with pytest.raises(SystemExit, match="gradient of rollout is wrong"):
        bench.check_gradient(work, 0.3, bench.build_tokenizer(work.shape.vocabulary))


def test_a_trainer_that_tells_other_counts_ends_the_run(bench):
    contender = bench.Contender(name="exact", rate=0.1)
    step = bench.Step(seconds=1.0, scoring=0.5, peak=0, rows=2, tokens=30, screened=0)
    log = {"kondo/rows_trained": 2, "kondo/tokens_trained": 30}
    bench.check_counts(contender, [step], [log])
    for name in log:
        with pytest.raises(SystemExit, match="exact at 10%: the trainer tells of"):
            bench.check_counts(contender, [step], [log | {name: 1}])


def test_the_sampler_s_log_probs_are_its_policy_s(bench, work):
    """By TRL's own forward, of a policy built anew: every trainer starts from the same weights."""
    policy = bench.build_policy(work.shape, work.device, 16)
    ids = torch.tensor([p + c for p, c in zip(work.prompts, work.completions, strict=True)])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            policy(input_ids=ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
    assert torch.allclose(torch.tensor(work.log_probs), -losses[:, -12:], atol=1e-5)


def test_ratios_are_between_steps_of_the_same_round(bench, work):
    """In the second round everything is ten times as slow; a ratio must not show it."""

    def turn(seconds, scoring, screen=None):
        counts = {"peak": 2**20, "rows": 8, "tokens": 128, "screened": 0}
        steps = [bench.Step(seconds=s, scoring=scoring, **counts) for s in seconds]
        stages = {"screen": screen, "select": 0.0, "forward": 0.0, "backward": 0.0}
        log = {} if screen is None else {f"kondo/seconds_{k}": v for k, v in stages.items()}
        return bench.Turn(steps, [log] * len(steps))

    contenders = bench.contenders_for([0.25], ["exact"])
    taken = [
        [turn([4.0, 4.0], 0.0), turn([40.0, 40.0], 0.0)],
        [turn([2.0, 2.0], 1.0, 1.0), turn([20.0, 20.0], 10.0, 10.0)],
    ]
    where = bench.environment(work.device, "none")
    shared = {"benchmark": "trl", "model": "quick", "config": "", **where}
    dense, exact = bench.summarise(work, contenders, taken, shared)
    assert (dense.speedup_p20, dense.speedup_p80, dense.limit) == (1, 1, None)
    assert (exact.speedup_p20, exact.speedup_p50, exact.speedup_p80) == (2, 2, 2)
    assert (exact.learner_speedup_p20, exact.learner_speedup_p80) == (4, 4)
    # A quarter of the tokens, and a screen that takes a quarter of TRL's time.
    assert (exact.limit, exact.share_of_limit) == (2, 1)
    assert (exact.peak_memory_mb, exact.repeats) == (1, 2)


def test_quick_numbers_need_a_file_of_their_own(bench):
    with pytest.raises(SystemExit):
        bench.parse(["--quick"])


@pytest.mark.parametrize("option", ["--group", "--micro-rows"])
def test_completions_that_do_not_divide_are_refused(bench, option, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--completions", "64", option, "7"])
    assert f"must be a multiple of {option}, got 64 and 7" in capsys.readouterr().err


def test_the_sizes_follow_the_device(bench):
    options = bench.parse(["--device", "cuda", "--completion-tokens", "512"])
    assert (options.model, options.completions, options.prompt_tokens) == ("qwen2-0.5b", 256, 128)
    assert options.completion_tokens == 512
    assert options.out.name == "trl_cuda.csv"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_it_runs_on_a_gpu_with_checkpointing(bench, tmp_path):
    path = tmp_path / "trl.csv"
    bench.main([*QUICK, str(path), "--device", "cuda", "--checkpointing"])
    with path.open(newline="") as file:
        assert all(float(line["peak_memory_mb"]) > 0 for line in csv.DictReader(file))
