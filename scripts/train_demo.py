"""Train the demonstration model from a token file: one process, one GPU (or a CPU with --tiny).

    python train_demo.py --tokens tokens.u16.xz --out run --seconds 1200
    python train_demo.py --tokens tokens.u16.xz --out run --tiny --steps 30       # a minute on a CPU

The token file is a raw little-endian uint16 stream (`.xz` or plain), documents separated by token 0. The schedule is a
fraction of the budget, in seconds of training or in steps: dense attention first, then the indexer and the draft layer
learn beside it, then attention is sparse, at last the weights are seen through 4-bit rounding while the rate decays.
Writes config.json, generation_config.json, model.safetensors (BF16), train_log.json, and resume.pt to go on from.
Evaluation on held-out text: train_demo_eval.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import train_demo_ops as ops
from torch import Tensor, nn
from train_demo_files import packaged_bytes, save_checkpoint
from train_demo_model import DemoModel, ModelConfig
from train_demo_optim import RULES, Optimizer, is_quantised

log = logging.getLogger("train_demo")
TINY = dict(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_value_head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    ngram_vocab_size_base=251,
    indexer_budget=64,
)


@dataclass(frozen=True)
class Plan:
    """Batch, budget, and the fractions of the budget at which the phases begin."""

    batch: int = 32  # sequences per step: 65,536 tokens, below the critical batch of a model this small
    length: int = 2048
    seconds: float = 0.0  # of training, compilation not counted; 0: count steps
    steps: int = 0
    draft_from: float = 0.55  # the draft layer and the indexers learn from here
    sparse_from: float = 0.75  # attention sees only what the indexers pick
    quantise_from: float = 0.85  # forward passes use 4-bit weights
    warmup: float = 0.01
    decay_from: float = 0.45  # constant rate before, then linear to zero
    balance: float = 0.01  # weight of the mean load-balancing loss
    index_rows: int = 64  # query positions per sequence that the indexer is distilled on
    lr_scale: float = 1.0
    seed: int = 0

    def rate(self, progress: float) -> float:
        """Learning-rate factor at a fraction of the budget."""
        if progress < self.warmup:
            return self.lr_scale * max(progress / self.warmup, 0.01)
        return self.lr_scale * min(1.0, max(0.0, (1 - progress) / (1 - self.decay_from)))

    def phase(self, progress: float) -> Phase:
        """What a step at a fraction of the budget does."""
        return Phase(progress >= self.sparse_from, progress >= self.draft_from, progress >= self.quantise_from)


@dataclass(frozen=True)
class Phase:
    """What a training step does besides fitting the next token."""

    sparse: bool  # attention sees only what the indexers pick
    draft: bool  # the draft layer and the indexers learn
    quantise: bool  # forward passes use 4-bit weights


class Windows:
    """Batches of token windows [batch, length + 1]: all once in random order, then again from another offset."""

    def __init__(self, tokens: Tensor, plan: Plan):
        self.tokens, self.plan, self.order = tokens, plan, torch.empty(0, dtype=torch.long)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.span = torch.arange(plan.length + 1, device=tokens.device)

    def next(self) -> Tensor:
        """int64, on the tokens' device."""
        length, batch = self.plan.length, self.plan.batch
        if len(self.order) < batch:
            offset = int(torch.randint(length, (1,), generator=self.generator))
            starts = torch.arange(offset, len(self.tokens) - length - 1, length)
            self.order = starts[torch.randperm(len(starts), generator=self.generator)]
        starts, self.order = self.order[:batch], self.order[batch:]
        return self.tokens[starts.to(self.tokens.device)[:, None] + self.span].long()


def read_tokens(path: Path, device: str) -> Tensor:
    """The token stream as int16 [n] (ids are below 32768)."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return torch.from_numpy(np.frombuffer(raw, "<u2").astype(np.int16)).to(device)


@torch.no_grad()
def init_weights(model: DemoModel, seed: int) -> None:
    """Unit-variance inputs, zero outputs: each block starts as a no-op on the streams.

    The injection weights are random, since four equal streams would stay equal. Decay rates per token spread
    geometrically over 0.002 .. 1 in each layer's heads."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        draw = torch.randn(p.shape, generator=generator)
        if "embed_tokens" in name or "ngram_embedding" in name:
            p.copy_(draw)
        elif any(part in name for part in ("out_proj", "o_proj", "down_proj", "value_proj", "ple.conv1d")):
            p.zero_()
        elif "lm_head" in name:
            p.copy_(0.005 * draw)
        elif "conv1d" in name:
            p.uniform_(-0.5, 0.5, generator=generator)
        elif p.ndim >= 2:
            p.copy_(draw * p.shape[-1] ** -0.5)
        elif name.endswith("A_log"):
            p.zero_()
        elif name.endswith("dt_bias"):
            rate = torch.logspace(math.log10(0.002), 0, len(p))
            p.copy_(rate.expm1().log())  # the inverse of softplus


def use_working_types(model: nn.Module, dtype: torch.dtype) -> None:
    """Large parameters to `dtype`, small ones float32: the optimizer keeps the masters."""
    for name, p in model.named_parameters():
        if is_quantised(name, p):
            p.data = p.data.to(dtype)


class Recorded:
    """A function of tensors recorded once as a CUDA graph: a call copies its inputs in and replays it.

    Launching the 3,700 kernels of a step from Python takes a third longer than running them. The current stream must
    not be the default one, and the function must have run on it before. The next call overwrites what this returns."""

    def __init__(self, function: Callable[..., dict[str, Tensor]], inputs: Sequence[Tensor]):
        self.inputs = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return self.outputs


class Trainer:
    """Model, optimizer, data, and where in the plan they are."""

    def __init__(self, config: ModelConfig, plan: Plan, tokens: Tensor, out: Path, graphs: bool = False):
        self.plan, self.out, self.graphs, self.windows = plan, out, graphs, Windows(tokens, plan)
        self.model = DemoModel(config)
        init_weights(self.model, plan.seed)
        self.model.to(tokens.device)
        self.optimizer = Optimizer(self.model)
        use_working_types(self.model, torch.bfloat16 if tokens.is_cuda else torch.float32)
        self.step, self.seconds, self.history = 0, 0.0, []
        self.phase, self.phase_step, self.recorded = None, 0, None

    @property
    def progress(self) -> float:
        """Fraction of the budget that is spent."""
        spent = self.seconds / self.plan.seconds if self.plan.seconds else self.step / self.plan.steps
        return min(1.0, spent)

    def losses(self, tokens: Tensor, rows: Tensor, phase: Phase) -> dict[str, Tensor]:
        """One forward pass of windows [B, T + 1]; "total" is the loss to differentiate. rows: see `Run.index_rows`."""
        model, plan = self.model, self.plan
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        run = model.run(plan.length, phase.sparse, rows if phase.draft else None)
        s, x = model.model(inputs, run)
        loss, logits = ops.token_loss(x, model.lm_head.weight, targets)
        balance = torch.stack(run.balance_losses).mean()
        out = dict(loss=loss, balance=balance, total=loss + plan.balance * balance)
        if phase.draft:
            draft_run = model.run(plan.length, phase.sparse, rows)
            embedding = nn.functional.embedding(targets, model.model.embed_tokens.weight.detach())
            _, x = model.mtp(s.detach(), embedding, draft_run)
            out["draft"] = ops.draft_loss(x, model.lm_head.weight.detach(), logits.detach())
            out["index"] = torch.stack(run.index_losses + draft_run.index_losses).sum()
            out["total"] = out["total"] + out["draft"] + out["index"] + plan.balance * draft_run.balance_losses[0]
        return out

    def update(self, tokens: Tensor, rows: Tensor, phase: Phase) -> dict[str, Tensor]:
        """One step of training; the losses before it."""
        losses = self.losses(tokens, rows, phase)
        losses["total"].backward()
        self.optimizer.step(phase.quantise)
        return {name: value.detach() for name, value in losses.items()}

    def draw_rows(self) -> Tensor:
        """Random query positions that see more than the indexer's budget: the others have nothing to choose."""
        budget, device = self.model.config.indexer_budget, self.windows.tokens.device
        return torch.randint(budget, self.plan.length, (self.plan.index_rows,), device=device)

    def warm_up(self) -> None:
        """Compile and check every phase before the clock starts: passes without an update."""
        tokens, rows = self.windows.next(), self.draw_rows()
        for phase in (Phase(False, False, False), Phase(False, True, False), Phase(True, True, True)):
            started = time.perf_counter()
            losses = self.losses(tokens, rows, phase)
            losses["total"].backward()
            self.model.zero_grad(set_to_none=True)
            log.info("%s: loss %.4f, %.1f s", phase, losses["loss"].item(), time.perf_counter() - started)

    def train_step(self) -> dict[str, Tensor]:
        """One batch, one update; eagerly for the first two steps of a phase, then by replaying a recording."""
        phase = self.plan.phase(self.progress)
        if phase != self.phase:
            self.phase, self.phase_step, self.recorded = phase, 0, None
        momentum = 0.85 + 0.10 * min(1.0, self.step / 300)  # Muon's usual warm-up
        self.optimizer.set(self.plan.rate(self.progress), momentum)
        batch = self.windows.next(), self.draw_rows()
        if self.graphs and self.phase_step == 2:
            self.recorded = Recorded(lambda *inputs: self.update(*inputs, phase), batch)
        self.step, self.phase_step = self.step + 1, self.phase_step + 1
        return self.recorded(*batch) if self.recorded else self.update(*batch, phase)

    def record(self, losses: dict[str, Tensor], rate: float) -> None:
        """Append a line to the loss curve."""
        tokens = self.step * self.plan.batch * self.plan.length
        line = dict(step=self.step, seconds=round(self.seconds, 1), tokens=tokens, tokens_per_s=round(rate))
        line |= {k: round(v.item(), 4) for k, v in losses.items() if k != "total"}
        self.history.append(line)
        log.info("%s", json.dumps(line))

    def save(self) -> None:
        """Checkpoint in published form, the log, and everything needed to go on."""
        save_checkpoint(self.out, self.model, self.optimizer.masters())
        rules = {kind: asdict(rule) for kind, rule in RULES.items()}
        sizes = dict(parameters=self.parameters, packaged_bytes=packaged_bytes(self.model))
        summary = dict(plan=asdict(self.plan), rules=rules, **sizes, curve=self.history)
        (self.out / "train_log.json").write_text(json.dumps(summary, indent=0) + "\n")
        state = dict(
            optimizer=self.optimizer.state(),
            step=self.step,
            seconds=self.seconds,
            history=self.history,
            order=self.windows.order,
            generator=self.windows.generator.get_state(),
        )
        torch.save(state, self.out / "resume.new")
        (self.out / "resume.new").replace(self.out / "resume.pt")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def resume(self) -> None:
        """Go on from `save`; the last batches may repeat."""
        state = torch.load(self.out / "resume.pt", map_location=self.windows.tokens.device, weights_only=True)
        self.optimizer.load_state(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.windows.order = state["order"].cpu()
        self.windows.generator.set_state(state["generator"].cpu())
        self.optimizer.publish(quantise=self.progress >= self.plan.quantise_from)

    def train(self, log_every: int, save_every_s: float) -> None:
        """Run to the end of the plan. The clock leaves out what saving takes."""
        saved = lap = time.perf_counter()
        while self.progress < 1:
            losses = self.train_step()
            if self.step % log_every == 0:
                losses["loss"].item()  # wait for the device, so that the clock is right
            now = time.perf_counter()
            self.seconds, lap = self.seconds + now - lap, now
            if self.step % log_every == 0:
                self.record(losses, self.rate(log_every))
            if now - saved > save_every_s:
                self.save()
                saved = lap = time.perf_counter()
        self.save()

    def rate(self, steps: int) -> float:
        """Tokens per second since the last line of the curve."""
        before = self.history[-1] if self.history else dict(step=self.step - steps, seconds=0.0)
        tokens = (self.step - before["step"]) * self.plan.batch * self.plan.length
        return tokens / max(self.seconds - before["seconds"], 1e-3)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="uint16 token stream, plain or .xz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and log")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, default=0.0, help="budget of training time")
    budget.add_argument("--steps", type=int, default=0, help="budget in steps")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--length", type=int, help="tokens per sequence, a multiple of 64")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="factor on every learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines of the curve")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/resume.pt")
    parser.add_argument("--tiny", action="store_true", help="a very small model on the CPU, small batches by default")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of every step from Python")
    parser.add_argument("--no-compile", action="store_true", help="run the array functions as they are")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Parse, build, train."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True  # the delta rule's float32 products; the error is far below bfloat16's
    plan = Plan(seconds=args.seconds, steps=args.steps, lr_scale=args.lr_scale, seed=args.seed)
    config = ModelConfig()
    if args.tiny:
        config, plan = replace(config, **TINY), replace(plan, batch=4, length=256, index_rows=16)
    plan = replace(plan, batch=args.batch or plan.batch, length=args.length or plan.length)
    if device == "cuda" and not args.no_compile:
        ops.compile_units()
    stream = torch.cuda.Stream() if device == "cuda" else None
    with torch.cuda.stream(stream):  # does nothing on a CPU
        trainer = Trainer(
            config, plan, read_tokens(args.tokens, device), args.out, stream is not None and not args.no_graphs
        )
        tokens, size = len(trainer.windows.tokens), packaged_bytes(trainer.model)
        log.info("%d parameters, %d bytes packaged, %d tokens on %s", trainer.parameters, size, tokens, device)
        if args.resume:
            trainer.resume()
        trainer.warm_up()
        trainer.train(args.log_every, args.save_every)


if __name__ == "__main__":
    main()
