"""A small transformer that writes like Shakespeare's roles: each role fine-tunes adapters, and sends only these.

The base model is trained once on half of the plays. SHAKESPEARE_DATA names the file shakespeare_lines.tsv.gz (columns
line_id, play, line_number, speaker, text), and SHAKESPEARE_BASE the file of the base model:

    python -m examples.shakespeare_adapters              # trains the base, and prints its hash
    umbel simulate examples/shakespeare_adapters.toml --set base_sha256=HASH
"""

import gzip
import os
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.plans.tensors import TensorKind
from umbel.client import LocalPlan, TorchClient

CHARACTERS = "\n !\"&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WINDOW, WIDTH, HEADS, LAYERS, RANK = 64, 96, 4, 3, 4
_LEAST = 4000  # characters that a role must say


class Adapted(nn.Module):
    """A linear layer beside which a product of two thin matrices learns (LoRA; Hu et al. 2022)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_down = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.lora_up = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, inputs: Tensor) -> Tensor:
        plain: Tensor = self.linear(inputs)
        return plain + inputs @ self.lora_down.T @ self.lora_up.T


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.queries(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return found


class Writer(nn.Module):
    """From (n, WINDOW) characters to logits (n, WINDOW, characters) of the ones that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, texts: Tensor) -> Tensor:
        x = self.characters(texts) + self.places.weight
        found: Tensor = self.out(self.norm(self.blocks(x)))
        return found


def writer(*, with_adapters: bool) -> Writer:
    """The base model; with adapters, everything else in it is frozen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Writer()
        if (base := Path(os.environ["SHAKESPEARE_BASE"])).exists():
            model.load_state_dict(load_file(base))
        if with_adapters:
            model.requires_grad_(False)
            for block in model.blocks:
                for name in ("queries", "mixed", "wide", "narrow"):
                    setattr(block, name, Adapted(getattr(block, name)))
    return model


class Role(TorchClient):
    """One speaking role."""

    def __init__(self, text: str, *, with_adapters: bool) -> None:
        n_held = len(text) // 5
        train, held = samples(text[:-n_held]), samples(text[-n_held:])
        super().__init__(writer(with_adapters=with_adapters), "tokens", train, held, device="cpu")
        self._with_adapters = with_adapters

    def shares(self, name: str) -> TensorKind | None:
        """Only adapters travel; every site has the rest."""
        return "base" if self._with_adapters and "lora_" not in name else None


def samples(text: str) -> TensorDataset:
    """Consecutive windows, and the characters that follow each place."""
    numbers = torch.tensor([max(CHARACTERS.find(one), 0) for one in text])
    n = (len(numbers) - 1) // WINDOW
    return TensorDataset(numbers[: n * WINDOW].view(n, WINDOW), numbers[1 : n * WINDOW + 1].view(n, WINDOW))


@cache
def roles(half: int) -> list[str]:
    """What each larger role of one half of the plays says."""
    with gzip.open(os.environ["SHAKESPEARE_DATA"], "rt", encoding="utf-8", errors="replace") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    said = defaultdict[tuple[str, str], list[str]](list)
    for _, play, _, speaker, text in rows:
        if speaker and speaker != "Stage Directions":
            said[play, speaker].append(text)
    plays = sorted({play for play, _ in said})
    texts = {name: "\n".join(lines) for name, lines in sorted(said.items()) if plays.index(name[0]) % 2 == half}
    return [text for text in texts.values() if len(text) >= _LEAST]


def make_client(number: int, of: int) -> Role:
    return Role(roles(1)[number], with_adapters=True)


def make_whole_client(number: int, of: int) -> Role:
    """Fine-tunes and sends the whole model."""
    return Role(roles(1)[number], with_adapters=False)


def client() -> Role:
    return make_client(int(os.environ.get("ROLE", "0")), len(roles(1)))


def main() -> None:
    site = TorchClient(writer(with_adapters=False), "tokens", samples("\n".join(roles(0))), device="cpu")
    plan = LocalPlan(steps=int(os.environ.get("STEPS", "3000")), batch_size=32, learning_rate=1e-3, optimizer="adamw")
    print(site.train(site.model, plan).metrics)
    save_file(site.model.state_dict(), os.environ["SHAKESPEARE_BASE"])
    adapted = Role(roles(1)[0], with_adapters=True)
    base = {name: value for name, value in adapted.model.state_dict().items() if adapted.shares(name) == "base"}
    print(f"{len(roles(1))} roles; base_sha256={base_sha256(base)}")


if __name__ == "__main__":
    main()
