"""Buffers that outlive a call must never show in a result."""

import threading

import torch

from kernels.dispatch import Ops
from kernels.scratch import Scratch
from tests.kernels.paging import Pool, Tokens, deal_pages, fill, make_batch
from tests.kernels.truth import bits


def test_a_buffer_is_kept_and_grows() -> None:
    scratch = Scratch()
    large = scratch.take("a", 4, 8, torch.float32)
    assert large.shape == (4, 8)
    assert scratch.take("a", 2, 3, torch.float32).data_ptr() == large.data_ptr()
    assert scratch.take("a", 5, 8, torch.float32).shape == (5, 8)
    assert scratch.take("a", 0, 8, torch.float32).shape == (0, 8)


def test_names_dtypes_and_threads_have_buffers_of_their_own() -> None:
    scratch = Scratch()
    taken = [
        scratch.take("a", 1, 8, torch.float32),
        scratch.take("b", 1, 8, torch.float32),
        scratch.take("a", 1, 8, torch.bfloat16),
    ]
    thread = threading.Thread(target=lambda: taken.append(scratch.take("a", 1, 8, torch.float32)))
    thread.start()
    thread.join()
    assert len({buffer.data_ptr() for buffer in taken}) == 4


def test_a_buffer_made_in_inference_mode_can_be_written_outside() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch.take("a", 1, 8, torch.float32).fill_(1)
    scratch.take("a", 1, 8, torch.float32).fill_(2)


def test_a_result_survives_the_next_call(ops: Ops) -> None:
    pool = Pool(pages=20, kv_heads=2, dim=32)
    sequences = [(30, 1), (40, 40), (35, 1)]
    tables = deal_pages([context for context, _ in sequences], pool)
    results, copies = [], []
    for _ in range(3):
        tokens = [Tokens.random(context, pool) for context, _ in sequences]
        fill(pool, ops, tokens, tables)
        for which in (slice(0, 3), slice(1, 2), slice(0, 1)):
            batch = make_batch(sequences[which], tables[which], 16)
            q = torch.randn(sum(rows for _, rows in sequences[which]), 4, 32)
            out = ops.paged_attention(q, pool.k_cache, pool.v_cache, batch, scale=0.2, window=None)
            results.append(out)
            copies.append(bits(out))
    assert [bits(out) for out in results] == copies
