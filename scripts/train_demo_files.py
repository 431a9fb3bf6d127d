"""Files of the demonstration model: the checkpoint in published form, and its size once packaged in 4 bits.

Owns tensor names on disk (text-only: below `model.`, plus `lm_head` and `mtp.`) and the split of the n-gram table into
shards. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_demo_model import DemoModel, ModelConfig
from train_demo_optim import affine_4bit, is_quantised

TABLE = "ngram_embedding.weight"
BITS_PER_WEIGHT = 4.5  # 4-bit codes, and a 16-bit scale and bias for each 64


def shard_name(table: str, i: int) -> str:
    """The name on disk of part i of the n-gram table."""
    return table.replace(TABLE, f"ngram_embedding.shard_{i}.weight")


def checkpoint_tensors(model: DemoModel, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name on disk -> tensor: `masters` (float32) in bfloat16, the model's integer buffers as they are."""
    tensors = {}
    for name, value in {**dict(model.named_buffers()), **masters}.items():
        value = value.detach().cpu()
        value = value.bfloat16() if value.is_floating_point() else value
        if name.endswith(TABLE):
            parts = value.chunk(model.config.split_ngram_parts)
            tensors |= {shard_name(name, i): part.contiguous() for i, part in enumerate(parts)}
        else:
            tensors[name] = value.contiguous()
    return tensors


def save_checkpoint(folder: Path, model: DemoModel, masters: Mapping[str, Tensor]) -> None:
    """Write config.json, generation_config.json and model.safetensors; the weights replace older ones atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=1) + "\n")
    generation = dict(do_sample=True, temperature=0.8, top_p=0.95, eos_token_id=config.eos_token_id)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_file(checkpoint_tensors(model, masters), folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint that `save_checkpoint` wrote."""
    stored = json.loads((folder / "config.json").read_text())
    stored |= stored["rope_parameters"]
    return ModelConfig(**{f.name: stored[f.name] for f in fields(ModelConfig)})


def load_checkpoint(folder: Path, quantise: bool = False) -> DemoModel:
    """The model in float32 on the CPU; `quantise`: with the values that the 4-bit package holds."""
    model = DemoModel(read_config(folder))
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in model.state_dict() if n.endswith(TABLE)]:
        shards = [shard_name(name, i) for i in range(model.config.split_ngram_parts)]
        tensors[name] = torch.cat([tensors.pop(shard) for shard in shards])
    model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    if quantise:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if is_quantised(name, p):
                    p.copy_(affine_4bit(p))
    return model


def packaged_bytes(model: DemoModel, small_bytes: int = 2) -> int:
    """Bytes of all parameters at 4.5 bits where the package quantises and `small_bytes` per value elsewhere."""
    sizes = [(p.numel(), is_quantised(name, p)) for name, p in model.named_parameters()]
    return round(sum(n * (BITS_PER_WEIGHT / 8 if quantised else small_bytes) for n, quantised in sizes))
