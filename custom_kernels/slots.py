"""Slot words: how ops say where an expert is. A word is chunk << 28 | page, in pages of 16 KiB."""

PAGE_BYTES = 16384
NO_SLOT = 0xFFFFFFFF
"""The word of an expert that is not in memory, and the filling of unused places."""
