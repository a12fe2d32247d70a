"""Attention over ragged batches, the one kernel that every mode of MoR needs (paper section 2.2).

A ragged batch is the live rows of several sequences back to back. Queries and keys carry positions,
ascending inside a sequence, and a key is visible iff it belongs to the same sequence and its
position is not above the query's. Dense causal attention, expert-choice and token-choice steps and
shared caches are all this one rule: the keys that a query sees are a prefix of its sequence's keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_CHUNK = 256  # query rows per call where queries and keys are different rows
FAR = 2**30  # the position of padding: above every true one


class Ragged(NamedTuple):
    """Which rows of a batch are live, and which of them belong together."""

    pos: Tensor  # (N,) position of each row in its sequence, ascending inside a sequence
    cu_seqlens: Tensor  # (B+1,) rows cu_seqlens[b] to cu_seqlens[b+1] are sequence b
    length: int | None  # rows per sequence if all have the same number, else None
    index: Tensor | None  # (N,) row numbers in the batch they were taken from; None: all of it

    def take(self, keep: Tensor, length: int | None = None) -> "Ragged":
        """The rows `keep` (ascending row numbers) alone; `length` of them per sequence, if known."""
        n_seq = len(self.cu_seqlens) - 1
        if n_seq == 1:
            length = len(keep)
        if length is None:
            cu_seqlens = torch.searchsorted(keep, self.cu_seqlens)
        else:
            cu_seqlens = torch.arange(n_seq + 1, device=keep.device) * length
        index = keep if self.index is None else self.index[keep]
        return Ragged(self.pos[keep], cu_seqlens, length, index)

    def sequence(self) -> Tensor:
        """(N,) the sequence that each row belongs to."""
        n_seq = len(self.cu_seqlens) - 1
        return torch.arange(n_seq, device=self.pos.device).repeat_interleave(
            self.cu_seqlens.diff(), output_size=len(self.pos)
        )


def ragged_batch(cu_seqlens: Tensor, length: int | None = None, start: Tensor | None = None) -> Ragged:
    """A batch of whole sequences, each counted from position 0 or from `start` (B,)."""
    n_seq = len(cu_seqlens) - 1
    if length is not None and start is None:
        pos = torch.arange(length, device=cu_seqlens.device).repeat(n_seq)
        return Ragged(pos, cu_seqlens, length, None)
    n_rows = int(cu_seqlens[-1])
    first = cu_seqlens[:-1] if start is None else cu_seqlens[:-1] - start
    pos = torch.arange(n_rows, device=cu_seqlens.device) - first.repeat_interleave(cu_seqlens.diff())
    return Ragged(pos, cu_seqlens, n_rows if n_seq == 1 else None, None)


def depth_attention(q: Tensor, k: Tensor, v: Tensor, queries: Ragged, keys: Ragged) -> Tensor:
    """Softmax attention of ragged queries over the keys they see, at scale D**-0.5.

    q (Nq, H, D); k, v (Nk, Hkv, D) with H a multiple of Hkv; returns (Nq, H, D). `queries is keys`
    says that both are the same rows. Every query must see at least one key.
    """
    q_place, k_place = padded_place(queries), padded_place(keys)
    q, k, v = pad(q, q_place), pad(k, k_place), pad(v, k_place)  # (B, H or Hkv, T, D)
    if queries is keys:  # padding stands behind the true rows, where no causal query looks
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        q_pos = pad(queries.pos, q_place, fill=FAR)  # padded queries see all, so none sees nothing
        k_pos = pad(keys.pos, k_place, fill=FAR)
        y = attention_by_position(q, k, v, q_pos, k_pos)
    return unpad(y, q_place)


def attention_by_position(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Padded attention: q (B, H, Tq, D), k and v (B, Hkv, Tk, D), positions (B, Tq) and (B, Tk).

    Queries go in chunks, each over just the keys that one of its rows can see: what causal masking
    saves is saved here too, and no mask is larger than (B, QUERY_CHUNK, Tk).
    """
    chunks = []
    on_host = q.device.type == "cpu" and not torch.compiler.is_compiling()
    for q_chunk, pos in zip(q.split(QUERY_CHUNK, 2), q_pos.split(QUERY_CHUNK, 1)):
        n_key = int((k_pos <= pos.amax(1, keepdim=True)).sum(1).max()) if on_host else k.shape[2]
        mask = k_pos[:, None, None, :n_key] <= pos[:, None, :, None]
        chunks.append(
            F.scaled_dot_product_attention(
                q_chunk, k[:, :, :n_key], v[:, :, :n_key], mask, enable_gqa=True
            )
        )
    return torch.cat(chunks, 2)


class Place(NamedTuple):
    """Where the rows of a ragged batch stand in its padded form (B, T)."""

    n_seq: int
    length: int  # T, the longest sequence
    slot: Tensor | None  # (N,) row of the flattened padded form; None: no padding is needed


def padded_place(rows: Ragged) -> Place:
    n_seq = len(rows.cu_seqlens) - 1
    if rows.length is not None:
        return Place(n_seq, rows.length, None)
    length = int(rows.cu_seqlens.diff().max())
    rank = torch.arange(len(rows.pos), device=rows.pos.device)
    sequence = rows.sequence()
    return Place(n_seq, length, rank + sequence * length - rows.cu_seqlens[sequence])


def pad(x: Tensor, place: Place, fill: int = 0) -> Tensor:
    """(N, H, D) -> (B, H, T, D), or (N,) -> (B, T); empty places hold `fill`."""
    if place.slot is not None:
        empty = x.new_full((place.n_seq * place.length, *x.shape[1:]), fill)
        x = empty.index_copy(0, place.slot, x)
    x = x.view(place.n_seq, place.length, *x.shape[1:])
    return x.transpose(1, 2) if x.dim() == 4 else x


def unpad(y: Tensor, place: Place) -> Tensor:
    """(B, H, T, D) -> (N, H, D)"""
    y = y.transpose(1, 2).reshape(place.n_seq * place.length, y.shape[1], y.shape[3])
    return y if place.slot is None else y[place.slot]
