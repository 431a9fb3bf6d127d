"""Make the stored logits of tests/golden with transformers (and, for MTP, an independent NumPy model).

usage: python tests/golden/capture.py [--mtp-reference numpy_oracle.py]

Needs torch and transformers 5.17 or newer. One file per shape of tests/checkpoints.py: token ids, logits
[tokens, vocabulary] float32, greedy continuation, and with --mtp-reference the draft logits of the MTP layer, for
weights that tests/checkpoints.py draws again from the same seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checkpoints  # noqa: E402

COUNT, GREEDY, SEED = 96, 16, 5


def reference_model(raw: dict[str, Any], weights: dict[str, np.ndarray]):
    """transformers' text model with the given weights, float32, evaluation mode."""
    import torch
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    text = {key: value for key, value in raw["text_config"].items() if key != "model_type" and value is not None}
    model = Qwen4ExpForCausalLM._from_config(Qwen4ExpTextConfig(**text), attn_implementation="eager").eval().float()
    fused = checkpoints.fuse_experts(weights, text["num_experts"])
    state = model.state_dict()
    tables: dict[str, list[np.ndarray]] = {}
    for name, value in fused.items():
        if ".ngram_embedding.shard_" in name:
            tables.setdefault(name.split(".shard_")[0] + ".weight", []).append(value)
        elif not name.startswith("mtp."):
            state[name].copy_(torch.from_numpy(value))
    for name, parts in tables.items():
        state[name].copy_(torch.from_numpy(np.concatenate(parts)))
    return model


def reference_logits(model, ids: np.ndarray) -> np.ndarray:
    """[T, V] float32."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def greedy(model, ids: np.ndarray, count: int) -> np.ndarray:
    """``count`` most likely ids after ``ids``, without a cache."""
    for _ in range(count):
        ids = np.append(ids, reference_logits(model, ids)[-1].argmax()).astype(ids.dtype)
    return ids[-count:]


def _mtp_logits(path: str, raw: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    spec = importlib.util.spec_from_file_location("mtp_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = {**raw["text_config"], "layer_types": checkpoints.layer_types(raw["text_config"])}
    eos = text["eos_token_id"]
    text["eos_token_id"] = eos[0] if isinstance(eos, list) else eos
    model = module.Model(text, {name.removeprefix("model."): value for name, value in weights.items()})
    logits, _ = model.mtp(model.streams(ids[:-1]), ids[1:])
    return logits.astype(np.float32)


def main(argv: list[str] | None = None) -> None:
    """Write one .npz per shape beside this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mtp-reference", help="a NumPy model with Model(config, weights).mtp")
    args = parser.parse_args(argv)
    for name, changes in checkpoints.SHAPES.items():
        raw = checkpoints.tiny_config(**changes)
        weights = checkpoints.random_weights(raw, SEED, mtp=True)
        ids = checkpoints.tokens(COUNT, SEED)
        model = reference_model(raw, weights)
        out = {"tokens": ids, "logits": reference_logits(model, ids), "greedy": greedy(model, ids, GREEDY)}
        out["checksum"] = np.float64(checkpoints.checksum(weights))
        if args.mtp_reference:
            out["mtp"] = _mtp_logits(args.mtp_reference, raw, weights, ids)
        np.savez_compressed(HERE / f"{name}.npz", **out)
        print(name, {key: value.shape for key, value in out.items()}, "std", out["logits"].std())


if __name__ == "__main__":
    main()
