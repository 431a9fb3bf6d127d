"""Gated DeltaNet between its projections: decode windows with a log that can be replayed, and chunked prefill."""

from custom_kernels.gdn_step.reference import Inputs, Spec, StepLog, Weights, gdn_prefill
from custom_kernels.gdn_step.reference import naive_gdn_commit as gdn_commit
from custom_kernels.gdn_step.reference import naive_gdn_step as gdn_step

__all__ = ["Inputs", "Spec", "StepLog", "Weights", "gdn_commit", "gdn_prefill", "gdn_step"]
