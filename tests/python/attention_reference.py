"""Attention written out in float64: what every kernel is compared with.

SPDX-License-Identifier: MIT
"""

import torch


def reference(q, k, v, slots, lengths, query_lengths, *, softmax_scale=None, window=0, softcap=0.0):
    """float64 ``[tokens, heads, dim]`` on q's device; q, k and v as `pyvmem.attention.prefill` takes them."""
    out, start = [], 0
    group = q.shape[1] // k.shape[2]
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for slot, length, queries in zip(slots, lengths, query_lengths):
        qs = q[start : start + queries].double()
        ks, vs = (x[slot, :length].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        row = torch.arange(length, device=q.device)
        position = torch.arange(length - queries, length, device=q.device)[:, None]
        seen = row <= position
        if window:
            seen &= row > position - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, vs))
        start += queries
    return torch.cat(out)


def error(out, expected):
    """Relative error in the Frobenius norm; infinite where something is not finite."""
    out = out.double()
    if not out.isfinite().all():
        return float("inf")
    return ((out - expected).norm() / expected.norm()).item()
