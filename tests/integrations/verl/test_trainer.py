"""The controller's side of an update: what is read, what is sent to verl's own, what is logged.

verl's transfer queue and its update are stand-ins here; `test_fit` runs the real ones, and
`test_update` the real worker.
"""

import warnings

import pytest
import torch

import kondo
from tolerances import assert_close

pytestmark = pytest.mark.verl

ROWS = 8
KEYS = [f"{prompt}_{session}_0" for prompt in "ab" for session in range(4)]
REWARDS = [1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]


class Queue:
    """Rows by name; what is not there is left out, as verl's queue does."""

    def __init__(self, rows):
        self.rows = rows

    def kv_batch_get(self, keys, partition_id, select_fields):
        assert keys == KEYS
        return self.rows.select(*(name for name in select_fields if name in self.rows))


class Group:
    _dispatch_info = {"actor": [0, 1]}  # noqa: RUF012

    def __init__(self):
        self.tried, self.findings = [], []

    def check_policy(self, batch):
        self.tried.append(batch)
        return {"found": {"findings": self.findings, "seconds": 0.5}}


@pytest.fixture(scope="module")
def modules():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.trainer.ppo.v1  # noqa: F401

        from kondo.integrations.verl import trainer
    return trainer


@pytest.fixture
def made(modules, monkeypatch):
    """Return a function that makes a trainer for a gate, and the updates that verl would run."""
    from hydra import compose, initialize_config_module
    from transfer_queue import KVBatchMeta

    from integrations.verl.tiny import make_rows

    rows = make_rows(ROWS)
    jagged = {"old_log_probs": [], "rm_scores": [], "advantages": []}
    for mask, reward in zip(rows["response_mask"].unbind(), REWARDS, strict=True):
        score = torch.zeros(mask.numel())
        score[-1] = reward
        jagged["rm_scores"].append(score)
        jagged["old_log_probs"].append(torch.full((mask.numel(),), -1.0))
        mean = 0.25 if reward != 0.5 else 0.5
        jagged["advantages"].append((reward - mean) / 0.43 * mask)
    for name, values in jagged.items():
        rows[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    queue, sent = Queue(rows), []
    monkeypatch.setattr(modules, "tq", queue)

    def updated(self, batch, metrics):
        sent.append(batch)
        metrics["actor/grad_norm"] = 1.0
        return batch

    monkeypatch.setattr(modules.PPOTrainerSync, "_update_actor", updated)
    sizes = rows["input_ids"].offsets().diff().tolist()

    def make(gate, *options, padding=()):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(
                "ppo_trainer",
                [
                    f"+trainer.v1.kondo.gate={gate}",
                    "algorithm.adv_estimator=grpo",
                    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
                    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                    "actor_rollout_ref.rollout.n=4",
                    *options,
                ],
            )
        trainer = modules.KondoTrainer.__new__(modules.KondoTrainer)
        trainer.config, trainer.actor_rollout_wg = config, Group()
        trainer.gate, trainer.empty_updates = modules.read_options(config).gate, 0
        trainer._draws = torch.Generator().manual_seed(0)
        tags = [{"seq_len": size, "is_padding": row in padding} for row, size in enumerate(sizes)]
        return trainer, KVBatchMeta(keys=KEYS, tags=tags, partition_id="train")

    return make, queue, sent


def kept_keys(sent):
    """Return key -> weight of what the steps of the plan train."""
    (batch,) = sent
    per_rank = len(batch.keys) // 2
    return {
        batch.keys[rank * per_rank + row]: weight
        for step in batch.extra_info["kondo_plan"]["steps"]
        for rank in range(2)
        for row, weight in zip(step.rows[rank], step.weights[rank], strict=True)
        if weight
    }


def test_the_rows_with_a_reward_above_their_prompts_are_sent(made):
    make, _, sent = made
    trainer, batch = make("price:0")
    metrics = {}
    assert trainer._update_actor(batch, metrics) is batch
    assert kept_keys(sent) == {"a_0_0": 1.0}
    assert metrics["kondo/rows_kept"] == 1
    assert metrics["kondo/rows_seen"] == ROWS
    assert metrics["kondo/rows_trained"] == 2  # and a filler on the other rank
    assert metrics["kondo/fillers"] == 1
    assert metrics["kondo/empty_steps"] == 1  # the mini-batch without it
    assert metrics["actor/grad_norm"] == 1.0
    assert {"kondo/seconds_read", "kondo/seconds_select", "kondo/seconds_update"} <= set(metrics)
    assert not any(value != value or abs(value) == float("inf") for value in metrics.values())


def test_an_unbiased_gate_keeps_whatever_has_an_advantage_at_noise_one(made):
    make, _, sent = made
    trainer, batch = make("noise:1.0")
    trainer._update_actor(batch, {})
    assert kept_keys(sent) == dict.fromkeys(KEYS[:4], 1.0)  # the others have equal rewards


def test_a_gate_of_ones_own_gets_rewards_centred_by_prompt(made):
    make, _, sent = made
    trainer, batch = make("core.entries:page_gate")
    metrics = {}
    trainer._update_actor(batch, metrics)
    assert kept_keys(sent) == {"a_0_0": 1.0}  # half of 0.75 + 3 * 0.25
    assert metrics["kondo/rows_kept"] == 1


def test_the_kl_gives_rows_without_an_advantage_a_chance(made):
    make, queue, sent = made
    queue.rows["ref_log_prob"] = queue.rows["old_log_probs"] * 1.5
    trainer, batch = make("noise:1.0", "actor_rollout_ref.actor.use_kl_loss=True")
    trainer._update_actor(batch, {})
    assert set(kept_keys(sent)) == set(KEYS)


def test_importance_weights_of_zero_leave_nothing_to_learn(made):
    make, queue, sent = made
    queue.rows["rollout_is_weights"] = queue.rows["old_log_probs"] * 0
    trainer, batch = make("noise:1.0")
    metrics = {}
    trainer._update_actor(batch, metrics)
    assert sent == []
    assert metrics["kondo/empty_updates"] == trainer.empty_updates == 1
    assert "actor/grad_norm" not in metrics


def test_penalised_rewards_count_where_there_are_any(made):
    make, queue, sent = made
    queue.rows["token_level_rewards"] = queue.rows["rm_scores"] * -1
    trainer, batch = make("price:0")
    trainer._update_actor(batch, {})
    assert set(kept_keys(sent)) == set(KEYS[1:4])


def test_rows_that_verl_added_as_padding_are_never_kept(made):
    make, _, sent = made
    trainer, batch = make("price:0", padding=(0,))
    trainer._update_actor(batch, {})
    assert sent == []


def test_the_full_mini_batches_tokens_are_sent_along(made):
    make, queue, sent = made
    trainer, batch = make("noise:1.0")
    trainer._update_actor(batch, {})
    counts = [int(mask.sum()) for mask in queue.rows["loss_mask"].unbind()]
    steps = sent[0].extra_info["kondo_plan"]["steps"]
    members = ([0, 1, 4, 5], [2, 3, 6, 7])  # of two mini-batches on two ranks
    assert [step.num_tokens for step in steps] == [sum(counts[r] for r in own) for own in members]


def test_the_first_batch_is_tried_once_before_its_update(made):
    make, _, _ = made
    trainer, batch = make("price:0", padding=(0,))
    group, trainer._to_check = trainer.actor_rollout_wg, True
    first, second = {}, {}
    trainer._update_actor(batch, first)
    trainer._update_actor(batch, second)
    assert first["kondo/seconds_check"] == 0.5
    assert "kondo/seconds_check" not in second
    (tried,) = group.tried
    assert len(tried.keys) == 6  # of two ranks; one row is padding
    assert KEYS[0] not in tried.keys
    assert tried.fields == ["input_ids", "response_mask"]
    assert tried.extra_info == {"temperature": 1.0}
    assert batch.fields != tried.fields


def test_what_any_rank_found_ends_the_run_before_the_update(made):
    make, _, sent = made
    trainer, batch = make("noise:1.0")
    trainer._to_check, trainer.actor_rollout_wg.findings = True, ["rows depend", "tokens see"]
    with pytest.raises(kondo.CheckError, match=r"found 2 faults:\n1\. rows depend\n2\.") as caught:
        trainer._update_actor(batch, {})
    assert "+trainer.v1.kondo.check=False" in caught.value.__notes__[0]
    assert sent == []


def test_a_batch_in_which_nothing_counts_leaves_the_check_to_the_next(made):
    make, _, _ = made
    trainer, batch = make("price:0", padding=range(ROWS))
    trainer._to_check = True
    trainer._update_actor(batch, {})
    assert trainer._to_check
    assert trainer.actor_rollout_wg.tried == []


def test_dense_is_verls_own_update_and_worker(made, modules, monkeypatch):
    make, queue, sent = made
    trainer, batch = make("dense")
    queue.kv_batch_get = None  # nothing is read
    metrics = {}
    assert trainer._update_actor(batch, metrics) is batch
    assert sent == [batch]
    assert set(metrics) == {"actor/grad_norm"}
    mapping = {}

    def pools(self):
        self.role_worker_mapping = mapping
        mapping.update({"actor_rollout": "verl's", "critic": "verl's"})

    monkeypatch.setattr(modules.PPOTrainerSync, "_init_resource_pool_mgr", pools)
    trainer._init_resource_pool_mgr()
    assert mapping == {"actor_rollout": "verl's", "critic": "verl's"}
    gated, _ = make("price:0")
    gated._init_resource_pool_mgr()
    assert mapping["critic"] == "verl's"
    assert mapping["actor_rollout"] != "verl's"


def test_state_comes_back_with_a_checkpoint(made, modules, monkeypatch, tmp_path):
    make, _, _ = made
    folder = f"trainer.default_local_dir={tmp_path}"
    written = tmp_path / "global_step_3"
    written.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for name in ("_save_checkpoint", "_load_checkpoint"):
        monkeypatch.setattr(modules.PPOTrainerSync, name, lambda self: None)
    first, _ = make("unbiased:0.5", folder)
    first.global_steps, first.empty_updates = 3, 2
    torch.rand(5, generator=first._draws)
    first._save_checkpoint()
    second, _ = make("unbiased:0.5", folder)
    second.global_steps = 3
    second._load_checkpoint()
    assert second.empty_updates == 2
    assert_close(torch.rand(3, generator=second._draws), torch.rand(3, generator=first._draws))


def test_a_model_with_a_processor_is_refused(made, modules, monkeypatch):
    make, _, _ = made
    trainer, _ = make("price:0")

    def tokenizer(self):
        self.processor = object()

    monkeypatch.setattr(modules.PPOTrainerSync, "_init_tokenizer", tokenizer)
    with pytest.raises(ValueError, match="must be a model of text"):
        trainer._init_tokenizer()
    dense, _ = make("dense")
    dense._init_tokenizer()
