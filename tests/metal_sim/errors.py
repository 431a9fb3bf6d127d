"""The one exception of the simulator."""

from __future__ import annotations


class MetalError(Exception):
    """A kernel that Apple's compiler or chip would reject, or that gives no defined result."""
