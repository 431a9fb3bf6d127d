"""GGUF files, version 2 and 3, of any number of shards: checked headers, and tensors where they lie."""

from mlx_moe.formats.gguf.file import GgufFile, open_gguf
from mlx_moe.formats.gguf.header import Header, TensorPlace, read_header
from mlx_moe.formats.gguf.shards import neighbours

__all__ = ["GgufFile", "Header", "TensorPlace", "neighbours", "open_gguf", "read_header"]
