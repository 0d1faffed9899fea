"""TRL's asynchronous trainer on a CPU: a real queue, real samples, and two stand-ins.

The rollout worker plays samples back instead of asking vLLM for them, and plain attention takes the
place of the flash-attention kernel, which needs CUDA. TRL asks CUDA for the peak of the device too.
"""

import queue
from types import SimpleNamespace

import numpy as np
import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from integrations.trl.tiny import policy, prompts, tokenizer

OPTIONS = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "token_budget": 0,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 3,
}


def plain_attention(query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, **_):
    """`flash_attn_varlen_func`: segments of [tokens, heads, size], causal from the end."""
    outputs = []
    for number in range(len(cu_q) - 1):
        q = query[cu_q[number] : cu_q[number + 1]].transpose(0, 1)
        k, v = (x[cu_k[number] : cu_k[number + 1]].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        ends = torch.arange(k.shape[1] - q.shape[1], k.shape[1]).unsqueeze(1)
        scores = q @ k.transpose(1, 2) * softmax_scale
        scores = scores.masked_fill(torch.arange(k.shape[1]) > ends, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def use_cpu(monkeypatch):
    """Put the stand-ins where TRL looks for CUDA."""
    kernel = SimpleNamespace(flash_attn_varlen_func=plain_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def samples(number, *, groups_of=4, equal=False, seed=0):
    """Samples as TRL's worker makes them, old log-probs those of a model near the policy."""
    generator = np.random.default_rng(seed)
    model, found = policy(), []
    for group in range(number // groups_of):
        prompt = generator.integers(2, 22, size=int(generator.integers(2, 5)))
        rewards = np.ones(groups_of) if equal else generator.integers(0, 5, size=groups_of) * 1.0
        spread = rewards.std()
        advantages = (rewards - rewards.mean()) / (spread + 1e-8)
        for reward, advantage in zip(rewards, advantages, strict=True):
            completion = generator.integers(2, 22, size=int(generator.integers(1, 6)))
            ids = np.concatenate([prompt, completion]).astype(np.int64)
            with torch.no_grad():
                logs = model(torch.tensor(ids)[None]).logits[0, :-1].log_softmax(-1)
            taken = logs.gather(-1, torch.tensor(ids[1:, None]))[:, 0].numpy()
            noise = generator.normal(0, 0.05, size=len(taken))
            old = np.concatenate([[0.0], taken + noise]).astype(np.float32)
            found.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": "prompt"}],
                    completion=[{"role": "assistant", "content": "completion"}],
                    input_ids=ids,
                    completion_mask=(np.arange(len(ids)) >= len(prompt)).astype(np.int64),
                    old_log_probs=np.minimum(old, -1e-3),
                    advantage=float(advantage),
                    model_version=1,
                    group_id=group,
                    metrics={"reward": float(reward), "reward_std": float(spread)},
                )
            )
    return found


class Playback:
    """A rollout worker that has its samples already."""

    def __init__(self, given):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in given:
            self.rollout_buffer.put(sample)

    def start(self):
        pass

    def stop(self):
        pass

    def update_model_version(self, model_version):
        pass

    def check_health(self, stale_after_s):
        raise RuntimeError("the queue is empty: more samples were taken than the step has")


class NoTransfer:
    """No server, so no weights to send."""

    def init_weight_transfer(self):
        pass

    def pause(self):
        pass

    def send_weights(self, iterator):
        list(iterator)

    def resume(self):
        pass

    def destroy(self):
        pass


def trainer(tmp_path, kind, config, given, *, out="out", **options):
    """A trainer on the tiny policy whose queue holds the given samples."""
    if not (tmp_path / "model").exists():
        policy().save_pretrained(tmp_path / "model")
    return kind(
        str(tmp_path / "model"),
        reward_funcs=lambda **kwargs: [0.0],
        args=config(str(tmp_path / out), **(OPTIONS | options)),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        rollout_worker=Playback(given),
        weight_transfer=NoTransfer(),
    )
