"""Small policies of every kind the engine must handle, each as (module, log_prob, batch).

log_prob(rows) gives [n] or [n, T]; batches are nests of different kinds on purpose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

N, T, VOCAB = 7, 5, 11  # odd on purpose


def _taken(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


@dataclass
class Images:
    pixels: Tensor
    actions: Tensor
    name: str = "images"  # a non-tensor leaf


def mlp(generator):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    batch = (torch.randn(N, 6, generator=generator), torch.randint(4, (N,), generator=generator))
    return net, lambda rows: _taken(net(rows[0]), rows[1]), batch


def convolution(generator):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )
    pixels = torch.randn(N, 1, 6, 6, generator=generator)
    batch = Images(pixels, torch.randint(4, (N,), generator=generator))
    return net, lambda rows: _taken(net(rows.pixels), rows.actions), batch


class TinyTransformer(nn.Module):
    """Causal, with the embedding tied to the head."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = nn.Embedding(T + 1, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        length = ids.shape[1]
        hidden = self.embed(ids) + self.place(torch.arange(length, device=ids.device))
        ahead = torch.triu(torch.ones(length, length, dtype=torch.bool, device=ids.device), 1)
        return self.head(self.block(hidden, src_mask=ahead))


def _ids(generator):
    return torch.randint(VOCAB, (N, T + 1), generator=generator)


def transformer(generator):
    net = TinyTransformer()
    return (
        net,
        lambda rows: _taken(net(rows["ids"])[:, :-1], rows["ids"][:, 1:]),
        {
            "ids": _ids(generator),
            "note": "tied",
        },
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, VOCAB)

    def log_prob(self, rows):
        (ids,) = rows
        hidden, _ = self.lstm(self.embed(ids[:, :-1]))
        return _taken(self.head(hidden), ids[:, 1:])


def lstm(generator):
    net = Recurrent()
    return net, net.log_prob, [_ids(generator)]


def _hugging_face(net, generator):
    def log_prob(rows):
        logits = net(input_ids=rows["input_ids"], use_cache=False).logits
        return _taken(logits[:, :-1], rows["input_ids"][:, 1:])

    return net, log_prob, {"input_ids": _ids(generator)}


def gpt2(generator):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=T + 1, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _hugging_face(GPT2LMHeadModel(config), generator)


def llama(generator):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=T + 1,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return _hugging_face(LlamaForCausalLM(config), generator)


SAMPLES = {"mlp": mlp, "convolution": convolution}
SEQUENCES = {"transformer": transformer, "lstm": lstm, "gpt2": gpt2, "llama": llama}
ALL = SAMPLES | SEQUENCES


def build(name, *, seed=0, dtype=torch.float64, device="cpu"):
    """Return (module, log_prob, batch) of the named policy with seeded weights and data."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net, log_prob, batch = ALL[name](generator)
    net.to(device=device, dtype=dtype)
    return net, log_prob, _moved(batch, dtype, device)


def _moved(batch, dtype, device):
    def move(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)

    if isinstance(batch, Images):
        return Images(move(batch.pixels), move(batch.actions))
    if isinstance(batch, dict):
        return {key: move(value) for key, value in batch.items()}
    return type(batch)(move(value) for value in batch)


def shape(name):
    """Return the shape of the named policy's log-probs."""
    return (N,) if name in SAMPLES else (N, T)


def units(name):
    """Return the units the named policy can be gated by."""
    return ("sample",) if name in SAMPLES else ("token", "sequence")


CASES = [(name, unit) for name in ALL for unit in units(name)]
