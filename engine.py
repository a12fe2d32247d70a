"""Inference: a batch that is refilled whenever a token leaves, at whatever depth (paper section 3).

Requests wait in a queue, take a slot each, and hold pages of one pool (kvcache.py). In every engine step
tokens that are done, once they are enough, run the last layer and the head, those that follow them the
first layer, and then all tokens in flight the shared block, whatever their depth (passes.py). Prompts
are read in chunks among them. When pages run out, the youngest request is put back, to be computed again
later.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kvcache import PagedKV, PagedPass
from model import MoR
from passes import Passes, Tokens, of_fixed_sizes
from sampling import SamplingParams, draw, probabilities, uniform
from text import text_of
from tokenizer import usable_ids


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device={name} is not known; there are cpu, mps, cuda, cuda:1 and so on.")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0][:100]
        raise ValueError(f"device={name} cannot be used ({reason}); try --device=cpu.") from None
    return name


def halvings(n: int, least: int) -> list[int]:
    """n and halves of it, rounded up, down to `least`, ascending: [26, 51] for 51 and 16."""
    return [*halvings(-(-n // 2), least), n] if n >= 2 * least else [n]


DEFAULT = SamplingParams()


class Event(NamedTuple):
    """A token of a request, prompt and all, in order; it is told when it has been read."""

    request: int
    token: int
    depth: int | None  # recursion steps that the token took; None: the last one, which nothing reads
    ends: bool  # whether the request ends with it


@dataclass
class Request:
    number: int
    tokens: list[int]  # the prompt, and where it was put back, what had been generated
    params: SamplingParams
    n_prompt: int
    limit: int  # tokens that it can have at most
    told: int = 0  # tokens that there has been an Event of
    text: bytes = b""  # the end of what was generated, where a stop text may have begun


SLOT = np.dtype(
    [
        ("number", int),  # of its request; -1: the slot is free
        ("length", int),  # tokens known
        ("seen", int),  # tokens read, or on their way
        ("n_prompt", int),
        ("limit", int),
        ("told", int),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("seed", np.uint64),
        ("stops", bool),  # whether more than <|endoftext|> and the limit can end it
    ],
    align=True,
)
ROW = np.dtype([("slot", int), ("pos", int), ("step", int), ("done", bool)], align=True)


class Engine:
    """Generates for many requests at once with a model in eval mode.

    To compute in bfloat16, convert model.model: the routers beside it decide in float32.
    max_batch: requests that are computed at once. max_len: tokens of a request, prompt and all; by
    default the model's context. kv_bytes: size of the pool of keys and values; by default what max_batch
    requests of max_len tokens can need. chunk: prompt tokens that start in one step. gather: tokens that
    are done wait until this share of the requests in flight is, since the last layer and the head, whose
    weights are many, are then read once for all of them; at 0 none waits. continuous=False is static
    batching, for comparison: all tokens of a batch wait for the deepest, all requests for the longest.
    encoding: what the tokens mean; then requests end with <|endoftext|>, get no token that is no text,
    and may name stop texts. max_depth caps the recursion steps. compile: passes without prompts are made
    for a few fixed numbers of rows, compiled on a CPU and captured as graphs on a GPU.
    """

    def __init__(
        self, model: MoR, *, max_batch=32, max_len: int | None = None, kv_bytes: int | None = None,
        chunk=256, gather=0.5, continuous=True, max_depth: int | None = None,
        encoding: tiktoken.Encoding | None = None, attention="auto", compile=False,
    ):  # fmt: skip
        c, weight = model.config, model.model.norm.weight
        max_len = c.block_size if max_len is None else max_len
        max_depth = c.n_recursion if max_depth is None else max_depth
        for name, value, largest in (
            ("max_batch", max_batch, math.inf),
            ("max_len", max_len, c.block_size),
            ("chunk", chunk, math.inf),
            ("max_depth", max_depth, c.n_recursion),
        ):
            if not 1 <= value <= largest:
                raise ValueError(f"{name}={value} must lie from 1 to {largest}.")
        if not 0 <= gather <= 1:
            raise ValueError(f"gather={gather} must lie from 0 to 1.")
        if encoding is not None and encoding.n_vocab > c.vocab_size:
            raise ValueError(
                f"the model knows {c.vocab_size} of the encoding's {encoding.n_vocab} tokens."
            )
        self.model, self.encoding, self.max_len, self.chunk = model, encoding, max_len, chunk
        self.continuous, self.gather = continuous, gather
        self.kv = PagedKV(
            c, max_batch, max_len, max_depth, kv_bytes, weight.device, weight.dtype, attention
        )
        self.passes = Passes(model, self.kv)
        self.fast = of_fixed_sizes(self.passes) if compile else None
        # Numbers of rows that fixed passes are made for. A graph is captured in a moment; a compilation
        # takes long, and of the shared block, which is full most of the time, one must do.
        self.outer_sizes = halvings(max_batch, 1 if weight.is_cuda else 16)
        self.block_sizes = self.outer_sizes if weight.is_cuda else [max_batch]
        self.waiting: collections.deque[Request] = collections.deque()
        self.unread: collections.deque[Event] = collections.deque()  # of a step, while `stream` rests
        self.n_submitted = self.n_put_back = 0
        self.running: list[Request | None] = [None] * max_batch
        self.slots = np.zeros(max_batch, SLOT)
        self.slots["number"] = -1
        self.tokens = np.zeros((max_batch, max_len + 1), int)
        self.flight = np.zeros(0, ROW)  # tokens on their way,
        self.state: Tokens | None = None  # … and what the passes keep of each
        self.ran = collections.Counter()  # passes so far, by name
        self.n_row = 0  # tokens in those of the shared block
        if encoding is not None:
            self.usable = torch.from_numpy(usable_ids(encoding)).to(weight.device)

    # ---- requests ----

    def submit(self, tokens: list[int], params: SamplingParams = DEFAULT) -> int:
        """Queues a prompt; the number that its events bear. An empty one starts a document."""
        tokens = list(tokens)
        if not tokens:
            if self.encoding is None:
                raise ValueError("the prompt is empty; give at least one token.")
            tokens = [self.encoding.eot_token]
        n, n_vocab = len(tokens), self.model.config.vocab_size
        if n > self.max_len:
            raise ValueError(
                f"a prompt of {n} tokens exceeds the context of {self.max_len}; shorten it."
            )
        if not 0 <= min(tokens) <= max(tokens) < n_vocab:
            raise ValueError(f"the prompt has tokens outside the model's vocabulary of {n_vocab}.")
        if params.stop and self.encoding is None:
            raise ValueError("stop texts need an engine that knows the encoding; give stop_tokens.")
        limit = min(n + params.max_new_tokens, self.max_len + 1)  # nothing reads the last one
        need, page_bytes = self.kv.pages(max(n, limit - 1)), self.kv.page_bytes
        if need > self.kv.n_page:
            raise ValueError(
                f"a request of {limit} tokens can need {need * page_bytes:,} bytes of keys and values, "
                f"but there are {self.kv.n_page * page_bytes:,}; raise kv_bytes or lower max_new_tokens."
            )
        self.waiting.append(Request(self.n_submitted, tokens, params, n, limit))
        self.n_submitted += 1
        return self.n_submitted - 1

    def busy(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.waiting) or any(self.running)

    def stream(self) -> Iterator[Event]:
        """The events of all requests, until all have ended; who leaves early may go on with another."""
        while self.busy() or self.unread:
            self.unread.extend([] if self.unread else self.step())
            while self.unread:
                yield self.unread.popleft()

    def generate(
        self, prompts: Iterable[list[int]], params: SamplingParams = DEFAULT
    ) -> list[list[int]]:
        """The tokens that follow each prompt, with <|endoftext|> where that ended it."""
        n_prompt = {self.submit(prompt, params): max(1, len(prompt)) for prompt in prompts}
        tokens = collections.defaultdict(list)  # also those of requests submitted before
        for event in self.stream():
            tokens[event.request].append(event.token)
        return [tokens[number][n:] for number, n in n_prompt.items()]

    # ---- one step ----

    @torch.no_grad()
    def step(self) -> list[Event]:
        """What tokens that are done, and new ones, wait for, then one pass of the shared block."""
        events = self.leave()
        self.admit()
        for part in (self.enter, self.pass_block):
            while not part():
                self.put_back()
        return events

    def leave(self) -> list[Event]:
        """Last layer, head and sampling, for slots whose tokens are all done, once these are enough."""
        flight = self.flight
        on_way = np.bincount(flight["slot"], minlength=len(self.slots))
        done = np.bincount(flight["slot"][flight["done"]], minlength=len(self.slots))
        ready = (on_way > 0) & (on_way == done)
        gather = self.gather if self.continuous else 1
        if ready.sum() < max(1, gather * (on_way > 0).sum()):
            return []
        rows, slots, counts = self.by_slot(ready[flight["slot"]])
        row, s, last = flight[rows], self.slots[slots], counts.cumsum() - 1
        read_all = s["seen"] == s["length"]
        grows = read_all & (s["length"] < s["limit"])
        passes, kv, fill = self.prepare(slots, counts, row["pos"], self.kv.outer[1:])
        self.ran["leave"] += 1
        logits = passes.leave(self.state.x[fill(rows)], fill(last[grows]), kv)[: grows.sum()]
        self.drop(rows)

        no_more = read_all & ~grows  # of requests that ask for no new token
        events = self.tell(row, slots, counts, no_more)
        grown = slots[grows]
        new = self.choose(logits, grown)
        ended = self.append(grown, new)
        last_tokens = zip(self.slots["number"][grown[ended]].tolist(), new[ended].tolist())
        events += [Event(number, token, None, True) for number, token in last_tokens]
        self.vacate(np.concatenate((grown[ended], slots[no_more])))
        return events

    def tell(
        self, row: np.ndarray, slots: np.ndarray, counts: np.ndarray, ending: np.ndarray
    ) -> list[Event]:
        """Events of tokens just read, counts (B,) of slots (B,); not of those told before a put-back."""
        s, last = self.slots[slots], counts.cumsum() - 1
        ends = np.zeros(len(row), bool)
        ends[last] = ending
        depth = row["step"] * self.kv.steps_per_pass
        which = np.flatnonzero(row["pos"] >= s["told"].repeat(counts))
        columns = s["number"].repeat(counts), self.tokens[row["slot"], row["pos"]], depth, ends
        self.slots["told"][slots] = np.maximum(s["told"], row["pos"][last] + 1)
        return [Event(*values) for values in zip(*(c[which].tolist() for c in columns))]

    def append(self, slots: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Adds new tokens (B,) to slots (B,); whether each ends its request, (B,) bool."""
        self.tokens[slots, self.slots["length"][slots]] = new
        self.slots["length"][slots] += 1
        s = self.slots[slots]
        ended = s["length"] == s["limit"]
        if self.encoding is not None:
            ended |= new == self.encoding.eot_token
        for i in np.flatnonzero(s["stops"]):
            ended[i] |= self.stops(self.running[slots[i]], int(new[i]))
        return ended

    def admit(self) -> None:
        """Requests from the queue take free slots while there are pages for all that is to be read."""
        free = np.flatnonzero(self.slots["number"] < 0)
        if not self.continuous and len(free) < len(self.slots):
            return
        unread = (self.slots["length"] - self.slots["seen"])[self.slots["number"] >= 0]
        promised = self.kv.pages(unread[unread > 1]).sum()
        for slot in free:
            if not self.waiting:
                return
            promised += self.kv.pages(len(self.waiting[0].tokens))
            if promised > self.kv.n_free:
                return
            r = self.running[slot] = self.waiting.popleft()
            p, n = r.params, len(r.tokens)
            self.tokens[slot, :n] = r.tokens
            stops = bool(p.stop or p.stop_tokens)
            self.slots[slot] = (
                r.number, n, 0, r.n_prompt, r.limit, r.told,
                p.temperature, p.top_k, p.top_p, p.seed, stops,
            )  # fmt: skip

    def enter(self) -> bool:
        """Embedding and first layer, for the tokens of slots that have none on their way.

        Like `pass_block`, it does nothing, and says so, where there are too few pages.
        """
        s = self.slots
        idle = s["number"] >= 0
        idle[self.flight["slot"]] = False
        counts = np.where(idle, s["length"] - s["seen"], 0)
        prompts = np.flatnonzero(counts > 1)
        prompts = prompts[s["number"][prompts].argsort()]  # the first come have the chunk first
        before = counts[prompts].cumsum() - counts[prompts]
        counts[prompts] = np.clip(self.chunk - before, 0, counts[prompts])
        slots = np.flatnonzero(counts)
        counts = counts[slots]
        if len(slots) == 0:
            return True
        if not self.kv.reserve(slots, counts):
            return False
        new = np.zeros(counts.sum(), ROW)
        new["slot"] = slots.repeat(counts)
        new["pos"] = np.arange(len(new)) + (s["seen"][slots] + counts - counts.cumsum()).repeat(counts)
        passes, kv, fill = self.prepare(slots, counts, new["pos"], self.kv.outer[:1])
        self.ran["enter"] += 1
        state, done = passes.enter(fill(self.tokens[new["slot"], new["pos"]]), kv)
        state, new["done"] = state.take(slice(len(new))), done[: len(new)].cpu().numpy()
        s["seen"][slots] += counts
        self.state = self.state.join(state) if len(self.flight) else state
        self.flight = np.concatenate((self.flight, new))
        return True

    def pass_block(self) -> bool:
        """The shared block, once, for all tokens that are not done, whatever their depth."""
        rows, slots, counts = self.by_slot(~self.flight["done"])
        if len(rows) == 0:
            return True
        row = self.flight[rows]
        step = row["step"][counts.cumsum() - 1]  # tokens of a slot start together and stay so
        if self.kv.by_step and not self.kv.reserve(slots, counts, step):
            return False
        passes, kv, fill = self.prepare(slots, counts, row["pos"], self.kv.in_step[0], step)
        state, done = passes.block(self.state.take(fill(rows)), fill(row["step"]), kv)
        self.state.put(self.kv.on_device(rows), state.take(slice(len(rows))))
        self.flight["step"][rows] += 1
        self.flight["done"][rows] = done[: len(rows)].cpu().numpy()
        self.ran["block"] += 1
        self.n_row += len(rows)
        return True

    # ---- what the steps need ----

    def prepare(self, slots, counts, pos, layers, step=None) -> tuple[Passes, PagedPass, Callable]:
        """The passes to take, what they attend through, and how to bring an array over rows there.

        Where passes of fixed sizes will do, arrays are filled up with rows of nobody.
        """
        passes, size = self.passes, 0
        if self.fast is not None and len(pos) == len(slots):
            sizes = self.outer_sizes if step is None else self.block_sizes
            passes, size = self.fast, next(n for n in sizes if n >= len(slots))

        def fill(x: np.ndarray, value=0) -> np.ndarray:
            return np.append(x, np.full(size - len(x), value, x.dtype)) if len(x) < size else x

        step = step if step is None else fill(step)
        kv = self.kv.over(fill(slots, len(self.slots)), fill(counts, 1), fill(pos), layers, step)
        return passes, kv, lambda x: self.kv.on_device(fill(x))

    def choose(self, logits: Tensor, slots: np.ndarray) -> np.ndarray:
        """Logits (B, V) of slots (B,) to their next tokens (B,)."""
        s = self.slots[slots]
        if self.encoding is not None:
            # Ids beyond the encoding, and those of no text in it, are rows that training never met.
            logits = logits[:, : len(self.usable)].masked_fill(~self.usable, -math.inf)
        if (s["temperature"] == 0).all():
            return logits.max(1).indices.cpu().numpy()  # on a CPU in half the time of argmax
        asked = (self.kv.on_device(s[name]) for name in ("temperature", "top_k", "top_p"))
        u = uniform(s["seed"], (s["length"] - s["n_prompt"]).astype(np.uint64))
        return draw(probabilities(logits, *asked), self.kv.on_device(u)).cpu().numpy()

    def stops(self, request: Request, token: int) -> bool:
        """Whether a token just generated ends a request that has conditions of its own."""
        stop = [text.encode() for text in request.params.stop]
        if stop:
            added = text_of(self.encoding, token)
            request.text = (request.text + added)[-len(added) - max(map(len, stop)) :]
        return token in request.params.stop_tokens or any(text in request.text for text in stop)

    def by_slot(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows in flight that `which` marks, by slot and position; those slots; rows of each."""
        rows = np.flatnonzero(which)
        rows = rows[np.lexsort((self.flight["pos"][rows], self.flight["slot"][rows]))]
        return rows, *np.unique(self.flight["slot"][rows], return_counts=True)

    def drop(self, rows: np.ndarray) -> None:
        """Takes rows out of flight."""
        keep = np.delete(np.arange(len(self.flight)), rows)
        self.flight, self.state = self.flight[keep], self.state.take(self.kv.on_device(keep))

    def put_back(self) -> None:
        """The youngest request gives its slot and pages back, and waits to be computed again."""
        slot = self.slots["number"].argmax()
        request, s = self.running[slot], self.slots[slot]
        request.tokens, request.told = self.tokens[slot, : s["length"]].tolist(), int(s["told"])
        self.waiting.appendleft(request)
        self.drop(np.flatnonzero(self.flight["slot"] == slot))
        self.vacate(np.array([slot]))
        self.n_put_back += 1

    def vacate(self, slots: np.ndarray) -> None:
        self.kv.release(slots)
        self.slots["number"][slots] = -1
        for slot in slots:
            self.running[slot] = None
