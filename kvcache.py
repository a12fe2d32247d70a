"""Where keys and values live: recursion-wise, shared, shared with update (paper section 2.2.2).

Recursion-wise, each step has keys of its own, made by the tokens active in it. Shared, they are made
where a physical layer is first used, by all tokens, and reused wherever it is used again. With
update, a later step sees the shared rows with those of its active tokens replaced by fresh ones, for
that step alone. A forward pass over whole sequences keeps them in `PassKV`, generation in `KVCache`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import depth_attention, depth_mask
from modelconfig import ModelConfig
from ragged import Ragged


class PassKV:
    """Keys and values of one forward pass over whole sequences; nothing outlives the pass."""

    def __init__(self, config: ModelConfig, attention: str):
        self.config = config
        self.attention = attention  # who computes it, see kernels.runs_triton
        self.made = {}  # unrolled layer -> its keys and values

    def begin(self, rows: Ragged) -> None:
        self.all_rows = rows

    def enter(self, rows: Ragged, step: int | None) -> "PassKV":
        """What layers that run on these rows attend through, also when they are computed again."""
        entered = PassKV(self.config, self.attention)
        entered.made, entered.all_rows = self.made, self.all_rows
        entered.rows, entered.mask = rows, None
        return entered

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention (n, H, D) of unrolled layer `layer`; k and v are None where it reuses older ones."""
        source, index = self.config.first_use[layer], self.rows.index
        own = self.config.kv_mode == "recursion" or index is None  # queries and keys are the same rows
        if self.config.kv_mode != "recursion":
            if source == layer:
                self.made.setdefault(layer, (k, v))  # not those that are computed again
            shared_k, shared_v = self.made[source]
            if k is None:
                k, v = shared_k, shared_v
            elif index is not None:
                k, v = shared_k.index_copy(0, index, k), shared_v.index_copy(0, index, v)
        if self.mask is None:  # all layers of a step see the same
            self.mask = depth_mask(q, k, self.rows, None if own else self.all_rows, self.attention)
        return depth_attention(q, k, v, self.mask)


class KVCache:
    """Keys and values of `n_seq` growing sequences of up to `max_len` tokens each.

    A layer that makes keys stores them in a tensor (n_seq, max_len, Hkv, D). Recursion-wise, a step's
    rows are those of its active tokens back to back, and a token sees as many as were stored up to
    itself. Shared, row j is position j, and a token sees the rows up to its own position.

    Shared with update stores one full-length tensor per layer and step: the rows of the first use, with
    those of the step's active tokens replaced. What a token saw in training is then one contiguous
    range; to store the replaced rows alone would save (R-1)/2R of it, but every decoded token would
    have to merge two lists by position.
    """

    def __init__(self, config: ModelConfig, n_seq: int, max_len: int, device="cpu", dtype=torch.float32):
        self.config = config
        self.shape = (n_seq, max_len, config.n_kv_head, config.head_dim)
        self.k, self.v = {}, {}  # unrolled layer -> stored keys, values; allocated when first made
        self.device, self.dtype = device, dtype
        self.seen = torch.zeros(n_seq, dtype=torch.long, device=device)  # (n_seq,) tokens so far
        self.stored = [torch.zeros_like(self.seen) for _ in range(config.n_recursion)]  # … by each step

    def begin(self, rows: Ragged) -> None:
        """Opens a pass over new tokens, at positions `seen` and up of every sequence."""
        self.seen = self.seen + rows.cu_seqlens.diff()

    def enter(self, rows: Ragged, step: int | None) -> "KVCache":
        sequence, counts = rows.sequence(), rows.cu_seqlens.diff()
        rank = torch.arange(len(sequence), device=sequence.device) - rows.cu_seqlens[sequence]
        place = rows.pos
        if self.config.kv_mode == "recursion" and step is not None:
            place = rank + self.stored[step][sequence]
            self.stored[step] = self.stored[step] + counts
        self.place = sequence, place
        # Queries are padded to (B, T); a padded one sees one key, and nobody reads what it gets.
        self.padded = sequence, rank
        visible = torch.ones(len(counts), int(counts.max()), dtype=torch.long, device=self.device)
        visible[self.padded] = place + 1
        self.n_key = int(visible.max())
        self.mask = torch.arange(self.n_key, device=self.device) < visible[:, None, :, None]
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None:
            self.store(layer, k, v)
        source = layer if k is not None else self.config.first_use[layer]
        q_padded = q.new_zeros(self.mask.shape[0], self.mask.shape[2], *q.shape[1:])
        q_padded[self.padded] = q
        y = F.scaled_dot_product_attention(
            q_padded.transpose(1, 2),
            self.k[source][:, : self.n_key].transpose(1, 2).to(q.dtype),
            self.v[source][:, : self.n_key].transpose(1, 2).to(q.dtype),
            self.mask,
            enable_gqa=True,
        )
        return y.transpose(1, 2)[self.padded]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        first_use, layers = self.config.first_use, [layer]
        if self.config.kv_mode == "shared_update" and first_use[layer] == layer:
            # Every later step starts from these rows, also for the tokens that never get there.
            layers = [n for n, source in enumerate(first_use) if source == layer]
        for n in layers:
            if n not in self.k:
                self.k[n] = torch.zeros(self.shape, device=self.device, dtype=self.dtype)
                self.v[n] = torch.zeros_like(self.k[n])
            self.k[n][self.place] = k.to(self.dtype)
            self.v[n][self.place] = v.to(self.dtype)

    def bytes_in_use(self) -> int:
        """Bytes of the rows in use; each layer's tensor is allocated for max_len of them."""
        steps = [self.config.steps[layer] for layer in self.k]
        if self.config.kv_mode != "recursion" or self.config.routing == "none":
            steps = [None] * len(steps)
        rows = sum(int((self.seen if step is None else self.stored[step]).sum()) for step in steps)
        return rows * 2 * self.config.n_kv_head * self.config.head_dim * self.dtype.itemsize
