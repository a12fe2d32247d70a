"""Where keys and values live: recursion-wise, shared, shared with update (paper section 2.2.2).

Recursion-wise, each step has keys of its own, made by the tokens active in it. Shared, they are made
where a physical layer is first used, by all tokens, and reused wherever it is used again. With
update, a later step sees the shared rows with those of its active tokens replaced by fresh ones, for
that step alone. A forward pass over whole sequences keeps them in `PassKV`, generation in `PagedKV`:
one pool of pages, of which a recursion step takes some only for the tokens that were active in it.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import PagedMask, depth_attention, depth_mask, paged_attention, paged_mask, store_pages
from modelconfig import ModelConfig
from ragged import Ragged


class PassKV:
    """Keys and values of one forward pass over whole sequences; nothing outlives the pass."""

    def __init__(self, config: ModelConfig, attention: str, all_rows: Ragged):
        self.config, self.all_rows = config, all_rows
        self.attention = attention  # who computes it, see kernels.runs_triton
        self.made = {}  # unrolled layer -> its keys and values

    def enter(self, rows: Ragged) -> "PassKV":
        """What layers that run on these rows attend through, also when they are computed again."""
        entered = PassKV(self.config, self.attention, self.all_rows)
        entered.made, entered.rows, entered.mask = self.made, rows, None
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


PAGE_SIZE = 16  # rows of a page


class PagedPass(NamedTuple):
    """What the layers of one pass attend through: where its new rows go, and which pages they see."""

    kv: "PagedKV"
    layers: tuple[int, ...]  # the L unrolled layers of the pass, as the model calls them
    place: Tensor  # (L, copies * N) page * PAGE_SIZE + slot of each copy of the N new rows
    mask: PagedMask  # its page_table is (L, B, P), one for each layer

    @property
    def config(self) -> ModelConfig:
        return self.kv.config

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention (N, H, D) of an unrolled layer; k and v are None where it reuses older ones."""
        i = self.layers.index(layer)
        if k is not None:
            if (copies := len(self.place[i]) // len(k)) > 1:
                k, v = k.repeat(copies, 1, 1), v.repeat(copies, 1, 1)
            store_pages(k, v, self.kv.k, self.kv.v, self.place[i], self.mask)
        mask = self.mask._replace(page_table=self.mask.page_table[i])
        return paged_attention(q, self.kv.k, self.kv.v, mask)


class PagedKV:
    """Keys and values of up to n_seq growing sequences, in one pool of pages of equal size.

    A page holds PAGE_SIZE rows of one layer of one sequence. Recursion-wise, a step's rows are those of
    its active tokens back to back, and a token sees as many as were stored up to itself. Otherwise row j
    is position j, and a token sees the rows up to its own position.

    Shared with update stores one full-length list of rows per layer and step: those of the first use,
    with those of the step's active tokens replaced. What a token saw in training is then one list; to
    store the replaced rows alone would save (R-1)/2R of it, but every decoded token would have to merge
    two lists by position.

    The books are kept on the host, in arrays over sequences; a pass gets the part that it needs. Page 0
    is nobody's: rows that need not be kept are written there.
    """

    def __init__(
        self, config: ModelConfig, n_seq: int, max_len: int, max_depth: int, pool_bytes: int | None,
        device="cpu", dtype=torch.float32, attention="auto",
    ):  # fmt: skip
        self.config, self.attention = config, attention
        every, nobody = np.arange(config.n_layer), config.n_layer
        self.outer, self.in_step = parts_of(config, max_depth)
        self.steps_per_pass = max_depth // len(self.in_step)
        # Layers that make keys grow together where the same tokens pass them: a step's, and the others.
        self.by_step = config.routing != "none" and config.kv_mode == "recursion"
        made = [n for n in (*self.outer, *self.in_step.flat) if config.makes_keys(n)]
        self.grown_by_all = self.outer if self.by_step else np.array(made)
        # The layer whose rows a layer sees, and those that its new rows go to.
        self.seen_in = np.array(config.first_use) if config.kv_mode == "shared" else every
        self.kept_in = np.array([[n if config.makes_keys(n) else nobody] for n in every])
        if config.kv_mode == "shared_update":  # every later step starts from the rows of the first use,
            self.kept_in = np.pad(
                self.kept_in, ((0, 0), (0, len(self.in_step) - 1)), constant_values=nobody
            )
            self.kept_in[self.in_step[0]] = self.in_step.T  # also for the tokens that never get there
        # The last sequence and the last layer are nobody's.
        self.table = np.zeros((n_seq + 1, nobody + 1, max(2, -(-max_len // PAGE_SIZE))), np.int32)
        self.rows = np.zeros((n_seq + 1, 1 + len(self.in_step)), int)  # of all tokens, of each step's
        self.rows[n_seq] = 1
        self.page_bytes = 2 * PAGE_SIZE * config.n_kv_head * config.head_dim * dtype.itemsize
        self.n_page = (
            n_seq * self.pages(max_len) if pool_bytes is None else pool_bytes // self.page_bytes
        )
        shape = (self.n_page + 1, PAGE_SIZE, config.n_kv_head, config.head_dim)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        self.free = np.arange(self.n_page, 0, -1, dtype=np.int32)  # a stack: its first n_free are free
        self.n_free = self.least_free = self.n_page

    # ---- pages ----

    def pages(self, n_token: int | np.ndarray) -> int | np.ndarray:
        """Pages of n_token tokens of a sequence, all of them as deep as can be."""
        n_layer = len(self.grown_by_all) + self.by_step * self.in_step.size
        return -(-n_token // PAGE_SIZE) * n_layer

    def bytes_in_use(self) -> int:
        return (self.n_page - self.n_free) * self.page_bytes

    def most_bytes(self) -> int:
        """Bytes in use when they were most."""
        return (self.n_page - self.least_free) * self.page_bytes

    def reserve(self, seq: np.ndarray, n_new: np.ndarray, step: np.ndarray | None = None) -> bool:
        """Whether the pool has pages for n_new (B,) more rows of sequences seq (B,), which get them.

        step (B,): the rows are those of layers in that recursion step; None: in the layers where every
        token has a row.
        """
        group = 0 if step is None else step + 1
        layers = self.grown_by_all[None] if step is None else self.in_step[step]  # (1 or B, L)
        rows = self.rows[seq, group]
        held, wanted = -(-rows // PAGE_SIZE), -(-(rows + n_new) // PAGE_SIZE)
        new = wanted - held
        n_page = new.sum() * layers.shape[1]
        if n_page > self.n_free:
            return False
        which = np.repeat(np.arange(len(seq)), new)
        number = np.arange(len(which)) + np.repeat(held - (new.cumsum() - new), new)
        self.n_free -= n_page
        self.least_free = min(self.least_free, self.n_free)
        taken = self.free[self.n_free : self.n_free + n_page].reshape(len(which), layers.shape[1])
        layers = np.broadcast_to(layers, (len(seq), layers.shape[1]))[which]
        self.table[seq[which, None], layers, number[:, None]] = taken
        self.rows[seq, group] += n_new
        return True

    def release(self, seq: np.ndarray) -> None:
        """Sequences seq (B,) are done: their pages are free at once, and hold no NaN for the next."""
        held = self.table[seq]
        pages = held[held > 0]
        index = torch.from_numpy(pages).to(self.k.device, torch.long)
        self.k[index] = self.v[index] = 0
        self.free[self.n_free : self.n_free + len(pages)] = pages
        self.n_free += len(pages)
        self.table[seq] = 0
        self.rows[seq] = 0

    # ---- passes ----

    def over(
        self, seq: np.ndarray, counts: np.ndarray, pos: np.ndarray, layers: np.ndarray,
        step: np.ndarray | None = None,
    ) -> PagedPass:  # fmt: skip
        """A pass of `layers` (L,) over reserved rows: counts (B,) of sequences seq (B,), at pos (N,).

        step (B,): in the shared block, the recursion step of each sequence's rows. There the model calls
        the layers by their numbers in step 0, since one call serves rows of every step.
        """
        made = layers[None].repeat(len(seq), 0) if step is None else self.in_step[step]  # (B, L)
        which, row = np.repeat(np.arange(len(seq)), counts), pos
        if self.by_step and step is not None:
            row = np.arange(len(pos)) + np.repeat(self.rows[seq, step + 1] - counts.cumsum(), counts)
        number, slot = np.divmod(row, PAGE_SIZE)
        # A graph wants one width; torch.compile takes any but 1 for the same.
        width = self.table.shape[2] if self.k.is_cuda else max(2, number.max() + 1)
        table = self.table[seq[:, None], self.seen_in[made], :width].transpose(1, 0, 2)  # (L, B, P)
        table = np.where(table > 0, table, table[..., :1])  # not page 0: even unseen, a NaN spreads
        page = self.table[seq[which, None, None], self.kept_in[made[which]], number[:, None, None]]
        place = (
            (page * PAGE_SIZE + slot[:, None, None])
            .transpose(1, 2, 0)
            .reshape(len(layers), self.kept_in.shape[1] * len(pos))
        )
        pos, cu_seqlens, table, place, n_key = map(
            self.on_device, (pos, np.append(0, counts.cumsum()), table, place, row + 1)
        )
        rows = Ragged(pos, cu_seqlens, 1 if len(pos) == len(seq) else None, None)
        q = self.k.new_empty(0, self.config.n_head, self.config.head_dim)
        mask = paged_mask(q, self.k, rows, n_key, table, self.attention)
        return PagedPass(self, tuple(layers.tolist()), place, mask)

    def on_device(self, x: np.ndarray) -> Tensor:
        # Pageable memory is safe to hand to CUDA and forget; other devices may read it too late.
        x = torch.from_numpy(np.ascontiguousarray(x))
        return x.to(self.k.device, non_blocking=self.k.is_cuda)


def parts_of(config: ModelConfig, max_depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Unrolled layers outside the shared block (L,), and those of each step (max_depth, L).

    A plan that does not cycle has no block to share between tokens of different depths: it is one step.
    """
    every, steps = range(config.n_layer), config.steps
    if config.sharing.endswith("sequence"):
        used = [n for n in every if steps[n] is None or steps[n] < max_depth]
        return np.array([], int), np.array([used])
    outer = [n for n in every if steps[n] is None]
    return np.array(outer, int), np.array(
        [[n for n in every if steps[n] == r] for r in range(max_depth)]
    )
