"""Run very large mixture-of-experts models on small machines with MLX.

from mlx_moe import load, stream_generate
model, tokenizer = load()                      # the demonstration model; or a folder, or "org/repo"
for part in stream_generate(model, tokenizer, "def read_lines(path):", max_tokens=60):
    print(part.text, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import Any

from mlx_moe.environment import steady_numbers

steady_numbers()

__version__ = "0.1.0"

_EXPORTS = {
    "load": "mlx_moe.loading",
    "load_model": "mlx_moe.runtime",
    "save_model": "mlx_moe.runtime",
    "quantize_model": "mlx_moe.runtime",
    "generate": "mlx_moe.generation",
    "stream_generate": "mlx_moe.generation",
    "generate_tokens": "mlx_moe.generation",
    "save_prompt_cache": "mlx_moe.formats.prompt_cache",
    "load_prompt_cache": "mlx_moe.formats.prompt_cache",
    "MoceConfig": "mlx_moe.paging.moce",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    """Exports load on first use, so that ``import mlx_moe`` and the command's help are quick."""
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'mlx_moe' has no attribute {name!r}")
