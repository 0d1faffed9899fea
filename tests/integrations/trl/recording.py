"""Watch a trainer: what TRL generated, which rows each optimizer step saw, its gradient."""

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from oracles.grpo import counted

RAW = {
    "old": "old_per_token_logps",
    "ref": "ref_per_token_logps",
    "correction": "importance_sampling_ratio",
    "sampling": "sampling_per_token_logps",
}


def number_rows(monkeypatch, change=None):
    """Make TRL number the rows it generates; return the list its untouched outputs go to.

    Each row also notes the tokens of the micro-step that TRL puts it into.
    """
    outputs = []
    generate, prepare = GRPOTrainer._generate_and_score_completions, GRPOTrainer._prepare_inputs

    def numbered(self, inputs):
        output = generate(self, inputs)
        if change is not None:
            output = change(output)
        if self.model.training:
            first = self.accelerator.process_index * len(inputs)
            output["row_id"] = first + torch.arange(len(inputs))
            outputs.append({k: v.clone() if torch.is_tensor(v) else v for k, v in output.items()})
        return output

    def sliced(self, generation_batch):
        before = self._buffered_inputs
        inputs = prepare(self, generation_batch)
        if self._buffered_inputs is not before:
            for part in self._buffered_inputs:
                tokens = counted(part).sum()
                part["micro_tokens"] = tokens.expand(len(part["row_id"]))
        return inputs

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", numbered)
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", sliced)
    return outputs


class Recorder(TrainerCallback):
    """Parameters before, gradients of, and rows in each optimizer step."""

    def __init__(self, trainer):
        self.trainer, self.steps, self.slices = trainer, [], []
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = {k: v.detach().clone() for k, v in model.named_parameters()}

    def on_substep_end(self, args, state, control, **kwargs):
        """A micro-step ended. Note its rows, and which generation batch they come from."""
        number = self.trainer._step - 1
        part = self.trainer._buffered_inputs[number % args.steps_per_generation]
        generation = number // (args.steps_per_generation * args.num_iterations)
        self.slices.append(part | {"generation": generation})

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.on_substep_end(args, state, control)
        grads = {k: v.grad.clone() for k, v in model.named_parameters() if v.grad is not None}
        self.steps.append({"before": self.before, "grads": grads, "slices": self.slices})
        self.slices = []


class AsyncRecorder(TrainerCallback):
    """Of the asynchronous trainer: micro-batches with weights, and parameters and gradients.

    Attributes:
        micros: lists of (sample, weight), where the process decides.
        steps: (parameters before, gradients) of each optimizer step.
        calls: forwards.
        forwarded: their tokens.
    """

    def __init__(self, trained):
        self.micros, self.steps, self.calls, self.forwarded = [], [], 0, 0
        weigh = trained._weigh

        def noted(given):
            weights = weigh(given)
            self.micros.append(list(zip(given, weights, strict=True)))
            return weights

        trained._weigh = noted
        trained.model.register_forward_pre_hook(self._count, with_kwargs=True)
        trained.add_callback(self)

    def _count(self, module, args, kwargs):
        self.calls += 1
        self.forwarded += kwargs["input_ids"].numel()

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        inner = getattr(model, "module", model)
        self.before = {k: v.detach().clone() for k, v in inner.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        inner = getattr(model, "module", model)
        grads = {k: v.grad.clone() for k, v in inner.named_parameters() if v.grad is not None}
        self.steps.append((self.before, grads))


def record(trainer):
    """Attach a recorder to a trainer and train."""
    recorder = Recorder(trainer)
    trainer.train()
    return recorder.steps


def raw_micro(slice_, raw, share):
    """A micro-batch of the oracle: the slice's rows as TRL generated them, and what was kept.

    `share`: optimizer steps' part of a generation batch.
    """
    rows, tokens = slice_["row_id"], {"micro_tokens": slice_["micro_tokens"]}
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    micro = tokens | {name: raw[name][rows] for name in names}
    if "kondo_keep" in slice_:
        micro |= {"keep": slice_["kondo_keep"].float(), "gate_weight": slice_["kondo_weight"]}
    else:  # no gate
        micro["keep"] = torch.ones(micro["completion_mask"].shape)
    for name, source in {**RAW, "tool_mask": "tool_mask"}.items():
        if source in raw:
            micro[name] = raw[source][rows]
    return micro | {"tokens": raw["num_items_in_batch"] * share}


def centred(raw, reward, group_size):
    """Centred advantages of the generated rows, from the reward function alone: [n]."""
    lengths = raw["completion_mask"].sum(1).tolist()
    rows = zip(raw["completion_ids"].tolist(), lengths, strict=True)
    rewards = torch.tensor(reward([ids[:length] for ids, length in rows])).view(-1, group_size)
    return (rewards - rewards.mean(1, keepdim=True)).flatten()
