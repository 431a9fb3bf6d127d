"""Optimizer of the demonstration model: Muon for matrices, Adam for the rest, float32 masters, 4-bit fake quantisation.

Owns the update rules, the learning rate of each kind of parameter and MLX's affine rounding. Large parameters of the
model are working copies (bfloat16 in training) that every step rewrites from the masters kept here; with `quantise` the
copies are what the packaged model will compute with, and gradients pass straight through to the masters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GROUP_SIZE, LEVELS = 64, 15  # the package's affine format: 4 bits, groups of 64 along the input axis
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic of K. Jordan's Muon: drives singular values to about 1 in 5 steps


@dataclass(frozen=True)
class Rule:
    """How one kind of parameter is updated."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    muon: bool = False


# The table and embeddings see few gradients per row, hence large rates against a spread of 1 (see `init_weights`).
RULES = {
    "matrix": Rule(lr=0.025, weight_decay=0.1, muon=True),
    "embedding": Rule(lr=0.05),
    "table": Rule(lr=0.1),
    "head": Rule(lr=0.006, weight_decay=0.05),
    "small": Rule(lr=0.01),
    # Strong decay: loaders tell (1 + w) norms from folded ones by the mean of w, which must stay near 0.
    "norm": Rule(lr=0.008, weight_decay=0.3),
}


KINDS = {
    "embed_tokens": "embedding",
    "ngram_embedding": "table",
    "lm_head": "head",
    "conv1d": "small",
    "mlp.gate.": "small",  # the router
}


def kind_of(name: str, p: Tensor) -> str:
    """The rule of a parameter by its checkpoint name."""
    if "norm" in name and "linear_attn.norm" not in name:
        return "norm"
    for part, kind in KINDS.items():
        if part in name:
            return kind
    return "matrix" if p.ndim >= 2 and min(p.shape[-2:]) >= 32 else "small"


def is_quantised(name: str, p: Tensor) -> bool:
    """Whether the package stores this parameter in 4 bits: everything large but the router."""
    return kind_of(name, p) not in ("small", "norm")


def affine_4bit(w: Tensor) -> Tensor:
    """w [..., n * 64] rounded as `mx.quantize(bits=4, group_size=64)` rounds a bfloat16 array, and back to float32.

    One scale and bias per group, kept in bfloat16; the end of larger magnitude is exact, and so is a zero between."""
    x = w.to(torch.bfloat16).float().unflatten(-1, (-1, GROUP_SIZE))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp_min(1e-7)
    scale = torch.where(low.abs() > high.abs(), scale, -scale)
    edge = torch.where(low.abs() > high.abs(), low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    codes = torch.round((x - bias) / scale).clamp(0, LEVELS)
    return (codes * scale.bfloat16().float() + bias.bfloat16().float()).flatten(-2).view_as(w)


def orthogonalise(g: Tensor) -> Tensor:
    """Approximate U V^T of each matrix g [n, rows, cols] by five Newton-Schulz steps, in bfloat16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Group:
    """Parameters that share a rule and, for Muon, a matrix shape: one master tensor [n, rows, cols] or [elements]."""

    def __init__(self, rule: Rule, params: list[nn.Parameter], matrix: tuple[int, int] | None, quantised: bool):
        self.rule, self.params, self.quantised = rule, params, quantised
        self.shape = (-1, *matrix) if matrix else (-1,)
        self.master = torch.cat([p.detach().float().reshape(self.shape) for p in params])
        self.first = torch.zeros_like(self.master)
        self.second = None if rule.muon else torch.zeros_like(self.master)
        self.steps = torch.zeros((), device=self.master.device)

    def update(self, rate: Tensor, momentum: Tensor) -> bool:
        """One step from the parameters' gradients; False and no change if they have none (a part not trained yet)."""
        if any(p.grad is None for p in self.params):
            return False
        grad = torch.cat([p.grad.reshape(self.shape) for p in self.params]).float()
        lr = rate * self.rule.lr
        self.steps += 1
        self.master.mul_(1 - lr * self.rule.weight_decay)
        self.master.sub_(lr * (self.muon(grad, momentum) if self.rule.muon else self.adam(grad)))
        return True

    def muon(self, grad: Tensor, momentum: Tensor) -> Tensor:
        """Orthogonalised Nesterov momentum; tall matrices get a larger step, for an equal change of output."""
        self.first.lerp_(grad, 1 - momentum)
        rows, cols = self.shape[1:]
        return orthogonalise(grad.lerp(self.first, momentum)) * max(1.0, rows / cols) ** 0.5

    def adam(self, grad: Tensor) -> Tensor:
        """Bias-corrected Adam direction. Gradients of a mean over many tokens are small, hence the small epsilon."""
        b1, b2 = self.rule.betas
        self.first.lerp_(grad, 1 - b1)
        self.second.lerp_(grad.square(), 1 - b2)
        return (self.first / (1 - b1**self.steps)) / ((self.second / (1 - b2**self.steps)).sqrt() + 1e-10)

    def values(self, quantise: bool) -> list[Tensor]:
        """The masters in each parameter's shape, float32; rounded to 4 bits if asked and packaged so."""
        master = affine_4bit(self.master) if quantise and self.quantised else self.master
        parts = master.split([p.numel() // self.master[0].numel() for p in self.params])
        return [part.reshape(p.shape) for part, p in zip(parts, self.params, strict=True)]


class Optimizer:
    """All groups of a model. The draft layer and the indexers get groups of their own: they start training later.

    `rate` and `momentum` are tensors on the device and no step waits for it: a step can be recorded and replayed."""

    def __init__(self, model: nn.Module, rules: dict[str, Rule] = RULES):
        groups: dict[tuple, list] = defaultdict(list)
        self.names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            kind = kind_of(name, p)
            matrix = self.matrix_shape(name, p) if rules[kind].muon else None
            groups[kind, matrix, name.startswith("mtp."), "indexer" in name, is_quantised(name, p)].append(p)
        self.groups = [Group(rules[key[0]], params, key[1], key[4]) for key, params in groups.items()]
        self.rate = torch.zeros((), device=self.groups[0].master.device)
        self.momentum = torch.zeros_like(self.rate)

    def set(self, rate: float, momentum: float) -> None:
        """The factor on every rule's learning rate, and Muon's momentum, for the steps that follow."""
        self.rate.fill_(rate)
        self.momentum.fill_(momentum)

    @staticmethod
    def matrix_shape(name: str, p: Tensor) -> tuple[int, int]:
        """The shape Muon works on: an expert's gate and up halves are two matrices."""
        rows, cols = p.shape[-2:]
        return (rows // 2, cols) if "gate_up" in name else (rows, cols)

    @torch.no_grad()
    def step(self, quantise: bool) -> None:
        """Update every group that has gradients, rewrite the model's working copies, and drop the gradients."""
        for group in self.groups:
            if group.update(self.rate, self.momentum):
                torch._foreach_copy_(group.params, group.values(quantise))
            for p in group.params:
                p.grad = None

    @torch.no_grad()
    def publish(self, quantise: bool) -> None:
        """Rewrite all working copies of the model from the masters."""
        for group in self.groups:
            torch._foreach_copy_(group.params, group.values(quantise))

    def masters(self) -> dict[str, Tensor]:
        """Checkpoint name -> float32 master."""
        return {
            self.names[id(p)]: value
            for group in self.groups
            for p, value in zip(group.params, group.values(quantise=False), strict=True)
        }

    def state(self) -> list[dict]:
        """What `load_state` needs to go on exactly."""
        return [dict(master=g.master, first=g.first, second=g.second, steps=g.steps) for g in self.groups]

    def load_state(self, state: list[dict]) -> None:
        """Take over a state made by the same model and rules."""
        for group, saved in zip(self.groups, state, strict=True):
            for name, value in saved.items():
                setattr(group, name, value)
