"""Ragged batches: the live rows of several sequences back to back, and how to pad them.

One representation runs through training, evaluation, prefill and decoding: rows (N, d) of live tokens,
their positions (N,) and cu_seqlens (B+1,). A dense batch has equal lengths, an expert-choice step k rows
per sequence, a token-choice step and a decoding step unequal ones. Layers never see a batch axis; only
attention knows which rows belong together.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """Which rows of a batch are live, and which of them belong together."""

    pos: Tensor  # (N,) position of each row in its sequence, strictly ascending inside a sequence
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


def ragged_batch(cu_seqlens: Tensor, length: int | None = None) -> Ragged:
    """A batch of whole sequences, each counted from position 0.

    length: rows per sequence, where all have the same number.
    """
    n_seq = len(cu_seqlens) - 1
    if length is None and n_seq == 1:
        length = int(cu_seqlens[-1])
    n_rows = int(cu_seqlens[-1]) if length is None else n_seq * length
    sequence = torch.arange(n_seq, device=cu_seqlens.device).repeat_interleave(
        cu_seqlens.diff(), output_size=n_rows
    )
    pos = torch.arange(n_rows, device=cu_seqlens.device) - cu_seqlens[sequence]
    return Ragged(pos, cu_seqlens, length, None)


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
