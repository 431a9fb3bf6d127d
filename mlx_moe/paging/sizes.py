"""What a model takes in memory, by purpose: weights, experts, what sequences carry, temporaries.

Arithmetic on a configuration and on sizes of files. Knows no MLX, no file and no machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from custom_kernels.slots import PAGE_BYTES
from mlx_moe.config import LINEAR, ModelConfig

UNPACKED_BYTES = 512 << 20
"""Matrices of the two groups of experts that a prompt runs through at any time."""
TILE_BYTES, TILE_QUERIES = 64 << 20, 64
"""Keys and values that one tile of a prompt's queries gathers; and its queries, at most."""
TILES_IN_FLIGHT = 4
"""How many tiles are queued at once (models.qwen4_exp.attention)."""
FIRST_CAPACITY = 256
"""Key buffers start at this many positions and double."""
DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule in prompts."""
MAX_CHUNKS, CHUNK_BYTES = 4, 8 << 30
"""Of the arena. Each chunk is a page longer than what it holds."""


@dataclass(frozen=True)
class ModelSizes:
    """What a model's files say.

    Attributes:
        dense_bytes: of weights that stay in memory, as they are there, without the draft layer's.
        dense_token_bytes: of these, what one token reads.
        mtp_bytes: dense weights of the draft layer.
        records: bytes of one expert by layer, gaps between its parts included; the draft layer's last, if it is loaded.
        row_bytes: what one token reads of the n-gram table where that is on disk.
        table_bytes: of that table.
        streamed: whether experts may be on disk; otherwise every one has to be in memory.
        whole: the same model as numbers in memory, which is how it is loaded where that fits and nothing else is asked
            for; None where it never is.
    """

    config: ModelConfig
    dense_bytes: int
    dense_token_bytes: int
    mtp_bytes: int
    records: tuple[int, ...]
    row_bytes: int = 0
    table_bytes: int = 0
    streamed: bool = True
    whole: ModelSizes | None = None

    def __post_init__(self) -> None:
        layers = self.config.num_hidden_layers
        if len(self.records) not in (layers, layers + 1) or min(self.records) <= 0:
            raise ValueError(f"experts of {len(self.records)} layers; needed: {layers}, or {layers + 1} with a draft")
        if min(self.dense_bytes, self.dense_token_bytes, self.mtp_bytes, self.row_bytes, self.table_bytes) < 0:
            raise ValueError("a size of the model is negative")

    def of(self, config: ModelConfig) -> ModelSizes:
        """The same files as another configuration has them."""
        return replace(self, config=config, whole=self.whole and self.whole.of(config))

    @property
    def drafts(self) -> bool:
        """Whether the draft layer is loaded."""
        return len(self.records) > self.config.num_hidden_layers

    @property
    def slot_bytes(self) -> int:
        """Of one slot in every layer; records take whole pages of the arena."""
        if not self.streamed:
            return sum(self.records)
        return sum(-(-record // PAGE_BYTES) for record in self.records) * PAGE_BYTES

    @property
    def least_slots(self) -> int:
        """Per layer: what one token needs at once."""
        return self.config.num_experts_per_tok if self.streamed else self.config.num_experts

    @property
    def most_slots(self) -> int:
        """Per layer: all experts, or as many as the arena's chunks take, none across two."""
        if not self.streamed:
            return self.config.num_experts
        usable = MAX_CHUNKS * (CHUNK_BYTES - max(self.records) - 2 * PAGE_BYTES)
        return min(self.config.num_experts, usable // self.slot_bytes)

    @property
    def token_expert_bytes(self) -> int:
        """Of the experts that one token takes; the draft layer's not among them."""
        return self.config.num_experts_per_tok * sum(self.records[: self.config.num_hidden_layers])

    @property
    def expert_bytes(self) -> int:
        """Of all experts but the draft layer's."""
        return self.config.num_experts * sum(self.records[: self.config.num_hidden_layers])

    def arena_bytes(self, slots: int) -> int:
        """Of so many slots per layer."""
        return slots * self.slot_bytes + self.streamed * MAX_CHUNKS * PAGE_BYTES


def key_capacity(count: int) -> int:
    """Positions of a buffer that has grown to ``count``."""
    capacity = FIRST_CAPACITY if count else 0
    while capacity < count:
        capacity *= 2
    return capacity


def sparse_cache_bytes(config: ModelConfig, context: int, item_bytes: int) -> int:
    """Keys, values and index keys of one attention layer after ``context`` tokens."""
    keys = 2 * config.num_key_value_heads * config.head_dim * key_capacity(context)
    blocks = key_capacity(context // config.indexer_compress_ratio) + config.indexer_compress_ratio - 1
    return (keys + config.indexer_head_dim * blocks) * item_bytes


def state_bytes(config: ModelConfig, item_bytes: int) -> int:
    """What all Gated DeltaNet layers carry, whatever the context: float32 states, histories of convolutions, ids."""
    state = 4 * config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    conv = (config.linear_conv_kernel_dim - 1) * config.conv_dim * item_bytes
    ple = config.ple_conv_span * config.hc_count * config.hidden_size * item_bytes + 4 * (config.ngram_size - 1)
    return config.layer_types.count(LINEAR) * (state + conv) + len(config.ple_layer_ids) * ple


def workspace_bytes(config: ModelConfig, step: int, item_bytes: int, context: int) -> int:
    """Temporaries of a prompt's pass of at most ``step`` tokens that ends at ``context``; decoding takes far less.

    Counts streams, tokens sorted by expert, the delta rule's float32 arrays, unpacked experts, and what attention
    takes. Peaks of the demonstration model (steps of 512 to 2,048, float32, CPU) are not above it.
    """
    step = min(step, context)
    heads, streams = config.linear_num_value_heads, config.hc_count * config.hidden_size
    sorted_tokens = config.num_experts_per_tok * config.hidden_size
    delta = 3 * config.conv_dim + heads * (2 * config.linear_key_head_dim + 4 * config.linear_value_head_dim)
    token = item_bytes * (4 * streams + 3 * sorted_tokens) + 4 * (streams + delta + 4 * heads * DELTA_CHUNK)
    unpacked = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size * item_bytes
    return step * token + min(UNPACKED_BYTES, unpacked) + _attention_bytes(config, step, item_bytes, context)


def _attention_bytes(config: ModelConfig, step: int, item_bytes: int, context: int) -> int:
    """Keys and values gathered beyond the budget; within it the scores of all heads, before and after softmax."""
    selected = config.indexer_budget + config.indexer_compress_ratio - 1
    within = min(context, selected)
    scores = 2 * config.num_attention_heads * min(step, within) * within * item_bytes
    return scores if context <= selected else max(scores, TILES_IN_FLIGHT * _tile_bytes(config, item_bytes))


def _tile_bytes(config: ModelConfig, item_bytes: int) -> int:
    selected = config.indexer_budget + config.indexer_compress_ratio - 1
    query = 2 * selected * config.num_key_value_heads * config.head_dim * item_bytes
    return query * max(1, min(TILE_QUERIES, TILE_BYTES // query))
