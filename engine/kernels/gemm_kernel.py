"""The one GEMM kernel: y = A·B with MXFP4 or plain operands, dense or grouped by expert.

Legend: M rows of A and y, N columns of B and y, K the summed axis, G groups (experts). Packed operands hold two E2M1
codes a byte along K and one E8M0 scale for 32 values along K (a 2D operand: for a 32x32 tile, found by index
arithmetic). All strides are arguments, so fprop, dgrad and wgrad are the same program over differently strided
operands; ``B`` may be [G, K, N].

The sum over K may run in any order, so the software path never interleaves the two nibbles of a byte: it multiplies
the even k, then the odd k.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_values(nibbles, scale_codes):
    """Return the fp32 values of codes 0..15 (int32) under broadcastable E8M0 codes (int32); exact, NaN for 255."""
    magnitude = nibbles & 7
    # Codes 2..7 are the exponent and first mantissa bit of fp32, off by 126; code 1 is 2^-1, code 0 is zero.
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, magnitude * (252 << 22))
    bits = bits | ((nibbles & 8) << 28)
    scale_bits = tl.where(scale_codes == 0, 0x00400000, scale_codes << 23)
    scale_bits = tl.where(scale_codes == 255, 0x7FC00000, scale_bits)
    return bits.to(tl.float32, bitcast=True) * scale_bits.to(tl.float32, bitcast=True)


@triton.jit
def _spread(scales, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Repeat scales [ROWS, BLOCKS] 16 times along the last axis, once for each byte of a block."""
    wide = tl.broadcast_to(scales[:, :, None], (ROWS, BLOCKS, 16))
    return tl.reshape(wide, (ROWS, BLOCKS * 16))


@triton.jit
def packed_dot(a, a_scale, b, b_scale, acc, NATIVE: tl.constexpr, DOT: tl.constexpr):
    """Return acc + A·B for a [BM, BK/2], a_scale [BM, BK/32], b [BK/2, BN], b_scale [BN, BK/32], all uint8.

    Products are exact (an E2M1 product needs 5 bits) and summed in fp32. ``DOT`` is the dtype of the software path's
    operands: bfloat16 holds every value exactly; the interpreter's dot knows only float32.
    """
    if NATIVE:
        acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
    else:
        rows: tl.constexpr = a_scale.shape[0]
        cols: tl.constexpr = b_scale.shape[0]
        blocks: tl.constexpr = a_scale.shape[1]
        a_codes, b_codes = a.to(tl.int32), b.to(tl.int32)
        a_exp = _spread(a_scale.to(tl.int32), rows, blocks)
        b_exp = tl.trans(_spread(b_scale.to(tl.int32), cols, blocks))
        even_a, even_b = e2m1_values(a_codes & 15, a_exp), e2m1_values(b_codes & 15, b_exp)
        acc = tl.dot(even_a.to(DOT), even_b.to(DOT), acc, input_precision="ieee")
        odd_a, odd_b = e2m1_values(a_codes >> 4, a_exp), e2m1_values(b_codes >> 4, b_exp)
        acc = tl.dot(odd_a.to(DOT), odd_b.to(DOT), acc, input_precision="ieee")
    return acc


@triton.jit
def _locate(ends_ptr, slot, M, G, BM: tl.constexpr, SLOTS: tl.constexpr):
    """Return (group, first row, end row) of the ``slot``-th tile of BM rows when no tile may span two groups.

    Group G is the tail after the last group. A slot past the last tile gets an empty range of rows.
    """
    index = tl.arange(0, SLOTS)
    ends = tl.load(ends_ptr + index, mask=index < G, other=0)
    ends = tl.where(index < G, ends, M)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index <= G), other=0)
    starts = tl.where(index <= G, starts, M)
    last_tile = tl.cumsum((ends - starts + (BM - 1)) // BM)
    group = tl.sum((last_tile <= slot).to(tl.int32))
    here = index == group
    tiles_before = tl.sum(tl.where(index == group - 1, last_tile, 0))
    start = tl.sum(tl.where(here, starts, 0)) + (slot - tiles_before) * BM
    end = tl.sum(tl.where(here, ends, 0))
    return group, start, end


@triton.jit
def _tile_of(pid, tiles_m, tiles_n, BAND: tl.constexpr):
    """Walk the output in bands of BAND rows of tiles, column by column, so that neighbours share operands in L2."""
    per_band = BAND * tiles_n
    band = pid // per_band
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = pid % per_band
    return band * BAND + inside % height, inside // height


@triton.jit
def _load(pointers, outer, inner, MASK_OUTER: tl.constexpr, MASK_K: tl.constexpr):
    """Load a tile, zeros (code 0 under scale 0 is a zero too) outside of what the flags say must be checked."""
    if MASK_OUTER:
        if MASK_K:
            return tl.load(pointers, mask=outer & inner, other=0)
        else:
            return tl.load(pointers, mask=outer, other=0)
    else:
        if MASK_K:
            return tl.load(pointers, mask=inner, other=0)
        else:
            return tl.load(pointers)


@triton.jit
def _start(k, PER: tl.constexpr):
    """Return how many bytes or blocks, PER values each, come before k: a 64-bit scalar, zero for a constant k."""
    return (k // PER) * tl.full((), 1, tl.int64)


@triton.jit
def gemm_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    y_ptr,
    ends_ptr,
    M,
    N,
    K,
    G,
    a_stride_m,
    a_stride_k,
    a_scale_stride_m,
    a_scale_stride_k,
    b_stride_g,
    b_stride_k,
    b_stride_n,
    b_scale_stride_g,
    b_scale_stride_k,
    b_scale_stride_n,
    y_stride_g,
    y_stride_m,
    y_stride_n,
    ALPHA: tl.constexpr,
    PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
    GROUPED: tl.constexpr,
    SLOTS: tl.constexpr,
    A_TILED: tl.constexpr,
    B_TILED: tl.constexpr,
    MASK_M: tl.constexpr,
    MASK_N: tl.constexpr,
    MASK_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one BM x BN tile of y = ALPHA · A·B.

    GROUPED: 0, dense; 1, rows of A and y in groups that end at ``ends_ptr``, each with its own B; 2, the summed axis
    in groups, each with its own y. Ends are multiples of 32. Strides of packed operands along K count bytes or scales.
    MASK_M, MASK_N, MASK_K: whether the last tile along an axis can be partly empty.
    """
    tiles_n = tl.cdiv(N, BN)
    k_begin = 0
    k_end = K
    if GROUPED == 1:
        n_start = (tl.program_id(0) % tiles_n) * BN
        group, m_start, m_end = _locate(ends_ptr, tl.program_id(0) // tiles_n, M, G, BM, SLOTS)
        if m_start >= m_end:
            return
        # The tail behind the last group is written as zeros, an empty sum.
        k_end = tl.where(group == G, 0, K)
        group = tl.minimum(group, G - 1).to(tl.int64)
        b_ptr += group * b_stride_g
        b_scale_ptr += group * b_scale_stride_g
    else:
        tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(M, BM), tiles_n, BAND)
        m_start = tile_m * BM
        m_end = M
        n_start = tile_n * BN
        if GROUPED == 2:
            group = tl.program_id(1)
            k_end = tl.load(ends_ptr + group)
            k_begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
            y_ptr += group.to(tl.int64) * y_stride_g

    m_in = tl.arange(0, BM)
    n_in = tl.arange(0, BN)
    m_inside = m_in < m_end - m_start
    n_inside = n_in < N - n_start
    # Offsets of the tile are 64-bit scalars, those inside it 32-bit.
    a_ptr += m_start.to(tl.int64) * a_stride_m
    b_ptr += n_start.to(tl.int64) * b_stride_n
    acc = tl.zeros((BM, BN), tl.float32)
    if PACKED:
        bytes_in = tl.arange(0, BK // 2)
        blocks_in = tl.arange(0, BK // 32)
        a_ptrs = a_ptr + _start(k_begin, 2) * a_stride_k + m_in[:, None] * a_stride_m + bytes_in[None, :] * a_stride_k
        b_ptrs = b_ptr + _start(k_begin, 2) * b_stride_k + n_in[None, :] * b_stride_n + bytes_in[:, None] * b_stride_k
        a_rows = (m_start + m_in) // (32 if A_TILED else 1)
        b_cols = (n_start + n_in) // (32 if B_TILED else 1)
        a_scale_ptrs = a_scale_ptr + a_rows[:, None].to(tl.int64) * a_scale_stride_m
        a_scale_ptrs += _start(k_begin, 32) * a_scale_stride_k + blocks_in[None, :] * a_scale_stride_k
        b_scale_ptrs = b_scale_ptr + b_cols[:, None].to(tl.int64) * b_scale_stride_n
        b_scale_ptrs += _start(k_begin, 32) * b_scale_stride_k + blocks_in[None, :] * b_scale_stride_k
        for k in tl.range(k_begin, k_end, BK, num_stages=STAGES):
            blocks_left = (k_end - k) // 32
            # In whole blocks of 16 bytes, so that the compiler sees that a vector load never straddles the end.
            a_k, b_k = bytes_in[None, :] < blocks_left * 16, bytes_in[:, None] < blocks_left * 16
            scale_k = blocks_in[None, :] < blocks_left
            a = _load(a_ptrs, m_inside[:, None], a_k, MASK_M, MASK_K)
            b = _load(b_ptrs, n_inside[None, :], b_k, MASK_N, MASK_K)
            a_scale = _load(a_scale_ptrs, m_inside[:, None], scale_k, MASK_M, MASK_K)
            b_scale = _load(b_scale_ptrs, n_inside[:, None], scale_k, MASK_N, MASK_K)
            acc = packed_dot(a, a_scale, b, b_scale, acc, NATIVE, DOT)
            a_ptrs += BK // 2 * a_stride_k
            b_ptrs += BK // 2 * b_stride_k
            a_scale_ptrs += BK // 32 * a_scale_stride_k
            b_scale_ptrs += BK // 32 * b_scale_stride_k
    else:
        k_in = tl.arange(0, BK)
        a_ptrs = a_ptr + _start(k_begin, 1) * a_stride_k + m_in[:, None] * a_stride_m + k_in[None, :] * a_stride_k
        b_ptrs = b_ptr + _start(k_begin, 1) * b_stride_k + n_in[None, :] * b_stride_n + k_in[:, None] * b_stride_k
        for k in tl.range(k_begin, k_end, BK, num_stages=STAGES):
            a = _load(a_ptrs, m_inside[:, None], k_in[None, :] < k_end - k, MASK_M, MASK_K)
            b = _load(b_ptrs, n_inside[None, :], k_in[:, None] < k_end - k, MASK_N, MASK_K)
            acc = tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")
            a_ptrs += BK * a_stride_k
            b_ptrs += BK * b_stride_k

    y_ptr += m_start.to(tl.int64) * y_stride_m + n_start.to(tl.int64) * y_stride_n
    y_ptrs = y_ptr + m_in[:, None] * y_stride_m + n_in[None, :] * y_stride_n
    tl.store(y_ptrs, (acc * ALPHA).to(y_ptr.dtype.element_ty), mask=m_inside[:, None] & n_inside[None, :])


@triton.jit
def repack_kernel(
    source_ptr,
    target_ptr,
    pairs,
    length,
    source_stride_g,
    source_stride_new,
    source_stride_old,
    target_stride_g,
    target_stride_new,
    target_stride_old,
    BI: tl.constexpr,
    BJ: tl.constexpr,
):
    """Turn codes packed along the old axis into codes packed along the new one, 2x2 codes (two bytes) at a time.

    ``pairs`` counts pairs along the new axis, ``length`` bytes along the old one.
    """
    tiles_j = tl.cdiv(length, BJ)
    i = (tl.program_id(0) // tiles_j) * BI + tl.arange(0, BI)[:, None].to(tl.int64)
    j = (tl.program_id(0) % tiles_j) * BJ + tl.arange(0, BJ)[None, :].to(tl.int64)
    inside = (i < pairs) & (j < length)
    group = tl.program_id(1).to(tl.int64)
    source = source_ptr + group * source_stride_g + 2 * i * source_stride_new + j * source_stride_old
    first = tl.load(source, mask=inside, other=0)
    second = tl.load(source + source_stride_new, mask=inside, other=0)
    target = target_ptr + group * target_stride_g + i * target_stride_new + 2 * j * target_stride_old
    tl.store(target, (first & 15) | (second << 4), mask=inside)
    tl.store(target + target_stride_old, (first >> 4) | (second & 0xF0), mask=inside)


@triton.jit
def zero_tail_kernel(y_ptr, ends_ptr, rows, cols, G, y_stride_m, y_stride_n, BR: tl.constexpr, BC: tl.constexpr):
    """Write zeros to the rows of y [rows, cols] from the last group's end on."""
    end = tl.load(ends_ptr + G - 1)
    if tl.program_id(0) * BR + BR <= end:
        return
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    col = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (row >= end) & (row < rows) & (col < cols)
    zeros = tl.zeros((BR, BC), tl.float32).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row.to(tl.int64) * y_stride_m + col * y_stride_n, zeros, mask=inside)
