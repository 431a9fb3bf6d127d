"""Block formats of ggml quantisation, and FP8: sizes, tables, exact dequantisers and quantisers."""

from custom_kernels.ggml_blocks.formats import F8_E4M3, FORMATS, BlockFormat, format_by_id, format_by_name
from custom_kernels.ggml_blocks.quantize import QUANTIZABLE, quantize
from custom_kernels.ggml_blocks.reference import SCALE_DTYPES, check_scales, naive_dequantize

__all__ = [
    "F8_E4M3",
    "FORMATS",
    "QUANTIZABLE",
    "SCALE_DTYPES",
    "BlockFormat",
    "check_scales",
    "format_by_id",
    "format_by_name",
    "naive_dequantize",
    "quantize",
]
