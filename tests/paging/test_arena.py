"""The arena: chunks that fit, slots that do not overlap, memory that MLX sees; refusals come before allocations."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from custom_kernels.dequant_gemv import Matrix, expert_dequantize
from custom_kernels.ggml_blocks import format_by_name
from custom_kernels.slots import NO_SLOT, PAGE_BYTES
from mlx_moe.paging import arena as arena_module
from mlx_moe.paging.arena import SlotArena, chunk_pages, pages_of

PLENTY = 1 << 40
SMALL, LARGE = 2 * PAGE_BYTES, 3 * PAGE_BYTES - 5


def test_pages():
    assert [pages_of(n) for n in (1, PAGE_BYTES, PAGE_BYTES + 1)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("records", "most", "pages"),
    [
        ([(SMALL, 3)], 100, [6]),
        ([(SMALL, 3)], 6, [6]),
        ([(SMALL, 3)], 5, [4, 2]),
        ([(SMALL, 2), (LARGE, 2)], 7, [7, 3]),
        ([(SMALL, 2), (LARGE, 2)], 6, [4, 6]),
        ([(SMALL, 4)], 2, [2, 2, 2, 2]),
    ],
)
def test_no_record_lies_in_two_chunks(records, most, pages):
    assert chunk_pages(records, most) == pages


@pytest.mark.parametrize(("records", "most"), [([(SMALL, 5)], 2), ([(LARGE, 1)], 2), ([(SMALL, 1 << 40)], 1 << 16)])
def test_what_does_not_fit_is_refused(records, most):
    with pytest.raises(ValueError, match="do not fit into an arena; at most"):
        chunk_pages(records, most)


def test_the_budget_is_checked_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(arena_module.mx, "zeros", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"experts take 21.47 GB in memory, and 16.00 GB are left for them"):
        SlotArena([(1 << 20, 20 << 10)], budget_bytes=16_000_000_000)
    with pytest.raises(ValueError, match=r"and 0.00 GB are left"):
        SlotArena([(SMALL, 1)], budget_bytes=-5)


def test_a_budget_counts_the_page_that_alignment_takes():
    SlotArena([(SMALL, 1)], budget_bytes=SMALL + PAGE_BYTES)
    with pytest.raises(ValueError, match="left for them"):
        SlotArena([(SMALL, 1)], budget_bytes=SMALL + PAGE_BYTES - 1)


def test_everything_planned_can_be_allocated_and_nothing_more():
    arena = SlotArena([(SMALL, 5), (LARGE, 4)], PLENTY, most_chunk_bytes=9 * PAGE_BYTES)
    assert len(arena.arena.chunks) == 3 and arena.nbytes == (8 + 8 + 6 + 3) * PAGE_BYTES
    words = [arena.allocate(size) for size in [SMALL] * 5 + [LARGE] * 4]
    assert {word >> 28 for word in words} == {0, 1, 2} and len(set(words)) == 9
    with pytest.raises(ValueError, match="has no room for a record of 1 bytes"):
        arena.allocate(1)


def test_slots_never_overlap_and_free_pages_join_again():
    """Random use against a list of pages; in the end all of it is one stretch again."""
    rng = random.Random(5)
    arena = SlotArena([(40 * PAGE_BYTES, 1)], PLENTY)
    used: dict[int, range] = {}
    for _ in range(2000):
        if used and rng.random() < 0.5:
            word = rng.choice(list(used))
            arena.free(word)
            del used[word]
            continue
        size = rng.randint(1, 6)
        taken = {page for pages in used.values() for page in pages}
        fits = any(not taken & set(range(page, page + size)) for page in range(41 - size))
        if fits:
            word = arena.allocate(size * PAGE_BYTES)
            assert not taken & set(range(word, word + size)) and word + size <= 40
            used[word] = range(word, word + size)
        else:
            with pytest.raises(ValueError, match="no room"):
                arena.allocate(size * PAGE_BYTES)
    for word in used:
        arena.free(word)
    assert arena.allocate(40 * PAGE_BYTES) == 0


def test_what_is_written_is_what_kernels_read():
    """Through every chunk, from the first to the last byte of the record; other slots keep what they have."""
    format = format_by_name("F32")
    matrix = Matrix(format, 3, 2048, 16)
    nbytes = 16 + 3 * 2048 * 4
    arena = SlotArena([(nbytes, 5)], PLENTY, most_chunk_bytes=5 * PAGE_BYTES)
    assert len(arena.arena.chunks) == 3
    words, want = [], []
    for seed in range(5):
        words.append(arena.allocate(nbytes))
        want.append(np.random.default_rng(seed).standard_normal((3, 2048)).astype(np.float32))
        view = arena.view(words[-1], nbytes)
        assert view.shape == (nbytes,) and view.flags.writeable and view.flags.c_contiguous
        view[16:] = want[-1].view(np.uint8).reshape(-1)
    got = expert_dequantize(mx.array(words, dtype=mx.uint32), arena.arena, matrix, mx.float32)
    assert np.array_equal(np.array(got), np.stack(want))


def test_records_are_aligned():
    """To 16 KiB in memory on GPUs, 8 bytes after that where MLX's buffers start so."""
    arena = SlotArena([(SMALL, 4)], PLENTY, most_chunk_bytes=3 * PAGE_BYTES)
    for _ in range(4):
        address = arena.view(arena.allocate(SMALL), SMALL).ctypes.data
        assert address % PAGE_BYTES in (0, 8)
    assert all(base % 16 == 0 and 0 <= base <= PAGE_BYTES for base in arena.arena.bases)


@pytest.mark.parametrize("word", [1, 1 << 28, NO_SLOT])
def test_words_that_are_not_in_use(word):
    arena = SlotArena([(SMALL, 1)], PLENTY)
    first = arena.allocate(SMALL)
    for use in (arena.free, lambda word: arena.view(word, 1)):
        with pytest.raises(ValueError, match=f"slot {word:#010x} is not in use"):
            use(word)
    with pytest.raises(ValueError, match="larger than slot 0x00000000 of 2 pages"):
        arena.view(first, SMALL + 1)
    arena.free(first)
    with pytest.raises(ValueError, match="not in use"):
        arena.free(first)


@pytest.mark.full
def test_a_chunk_beyond_4_gib():
    """MLX's axes end at 2^31; the chunk does not."""
    arena = SlotArena([(1 << 20, (5 << 30) >> 20)], PLENTY)
    assert len(arena.arena.chunks) == 1
    word = [arena.allocate(1 << 20) for _ in range((5 << 30) >> 20)][-1]
    view = arena.view(word, 1 << 20)
    view[:16] = np.arange(4, dtype=np.float32).view(np.uint8)
    matrix = Matrix(format_by_name("F32"), 1, 4)
    got = expert_dequantize(mx.array([word], dtype=mx.uint32), arena.arena, matrix, mx.float32)
    assert got.tolist() == [[[0.0, 1.0, 2.0, 3.0]]]
