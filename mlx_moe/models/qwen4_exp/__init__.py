"""Qwen3.8-Flash-Next, one file per block."""

from mlx_moe.models.qwen4_exp.model import MTP, Model

__all__ = ["MTP", "Model"]
