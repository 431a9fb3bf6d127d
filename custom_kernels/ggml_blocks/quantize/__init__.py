"""Quantisers of ggml's block formats in mx ops, on the default device.

What bytes mean is in ``formats.py`` and ``reference.py`` beside this folder; which codes are chosen, in ``scalar.py``
(one code per weight) and ``lattice.py`` (grids of vectors).
"""

from custom_kernels.ggml_blocks.quantize.entry import QUANTIZABLE, quantize

__all__ = ["QUANTIZABLE", "quantize"]
