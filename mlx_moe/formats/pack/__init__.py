"""The pack: a model folder whose experts are records that can be read from disk one by one.

``config.json`` with a section ``pack``, tokenizer files, ``model*.safetensors`` (dense weights),
``experts*.safetensors`` and ``ngram*.safetensors``, or a reference to where the table lies in the file that it was left
in. All weight files are ordinary safetensors; what only this package knows of stands in their metadata (``layout.py``).
"""

from mlx_moe.formats.pack.layout import FORMAT_VERSION, LAYOUT, PAGE_BYTES, PartLayout, RecordLayout
from mlx_moe.formats.pack.reader import Pack, is_pack, open_pack
from mlx_moe.formats.pack.reference import TableReference
from mlx_moe.formats.pack.verify import verify_pack
from mlx_moe.formats.pack.writer import StreamedFile, TensorSpec

__all__ = [
    "FORMAT_VERSION",
    "LAYOUT",
    "PAGE_BYTES",
    "Pack",
    "PartLayout",
    "RecordLayout",
    "StreamedFile",
    "TableReference",
    "TensorSpec",
    "is_pack",
    "open_pack",
    "verify_pack",
]
