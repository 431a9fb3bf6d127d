"""Block formats of ggml quantisation: sizes, tables, exact dequantisers and quantisers."""

from custom_kernels.ggml_blocks.formats import FORMATS, BlockFormat, format_by_id, format_by_name
from custom_kernels.ggml_blocks.quantize import QUANTIZABLE, quantize
from custom_kernels.ggml_blocks.reference import naive_dequantize

__all__ = [
    "FORMATS",
    "QUANTIZABLE",
    "BlockFormat",
    "format_by_id",
    "format_by_name",
    "naive_dequantize",
    "quantize",
]
