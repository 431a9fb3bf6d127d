"""The gated delta rule: one-step decode with a log that can be replayed, and chunked prefill."""

from custom_kernels.gdn_step.reference import StepLog
from custom_kernels.gdn_step.reference import chunked_delta_rule as gdn_prefill
from custom_kernels.gdn_step.reference import naive_gdn_commit as gdn_commit
from custom_kernels.gdn_step.reference import naive_gdn_step as gdn_step

__all__ = ["StepLog", "gdn_commit", "gdn_prefill", "gdn_step"]
