"""Figures of a checkpoint: validation loss under each rule and depth, and few-shot benchmarks.

`python eval.py` prints nats per token, bits per byte and how deep tokens went; --max_depth=all caps the
recursion steps at every number, the paper's test-time scaling (its section 5). `--tasks=paper` runs the
paper's benchmarks (section 3) through lm-eval, which asks `Scorer` how likely texts are.
"""

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tiktoken
import torch
from tqdm import tqdm

import checkpoint
from command import exit_status
from dataset import Windows, open_dataset, whole_file
from engine import Engine, pick_device
from model import CHUNK_LOGITS, MoR
from ragged import ragged_batch
from sampling import SamplingParams
from settings import MOST_PASSES, TrainConfig, build
from text import pieces
from tokenizer import usable_ids
from validation import batches_of, rules, validate

# The paper's benchmarks, and what it reports of each; its MMLU scores the answers' texts, not letters.
PAPER = {
    "lambada_openai": "acc", "hellaswag": "acc_norm", "piqa": "acc_norm", "winogrande": "acc",
    "arc_easy": "acc_norm", "arc_challenge": "acc_norm", "mmlu_continuation": "acc",
}  # fmt: skip


def print_validation(
    args: argparse.Namespace, state: dict, model: MoR, encoding: tiktoken.Encoding, t: TrainConfig,
    depths: Sequence[int],
) -> None:  # fmt: skip
    """A row for each rule and greatest depth, as they come."""
    c, name = model.config, args.dataset or t.dataset
    tokens = open_dataset(name)[1]
    if tokens.encoding != encoding.name:
        raise ValueError(
            f"dataset {name!r} is in encoding {tokens.encoding!r}, but {args.checkpoint} reads "
            f"{encoding.name!r}; give --dataset=NAME of one in that."
        )
    if name == t.dataset and tokens.checksums != state["data"].get("val"):
        print(f"note: {name!r} changed since the training, which may know its texts.", file=sys.stderr)
    expert, n_batch = c.routing == "expert", None if args.all else args.eval_iters or t.eval_iters
    batches = batches_of(Windows(tokens, c.block_size, t.seed), args.batch_size, n_batch)
    columns = range(0 if expert and c.capacity[0] < 1 else 1, c.n_recursion + 1)
    n_tokens = sum(y.numel() for _, y in batches)
    print(f"{args.checkpoint}, step {state['step']}, on {n_tokens:,} tokens of {name}")
    head = "rule    max depth  nats/token  bits/byte  mean depth"
    print(head, *(f"depth {d}" for d in columns), sep="  ", flush=True)
    for rule, depth in itertools.product([args.rule] if args.rule else rules(c), depths):
        torch.manual_seed(t.seed)  # of random routing
        r = validate(model, batches, encoding, rule, depth, t.within_documents)
        row = f"{rule if expert else '–':6}{depth:11}{r['loss']:12.4f}{r['bits_per_byte']:11.4f}"
        reached = [1, *r["active"], 0]  # by step: the share of the tokens that took as many or more
        row += f"{sum(r['active']):12.2f}"
        row += "".join(f"{reached[d] - reached[d + 1]:9.1%}" for d in columns)
        print(row, flush=True)


def encode_pair(encoding: tiktoken.Encoding, context: str, continuation: str) -> tuple[list[int], int]:
    """The tokens of both texts as one, and how many of them, at least one, are the context.

    A token across the border is the continuation's. Where nothing comes before it, a document begins.
    """
    tokens, before = encoding.encode_ordinary(context + continuation), encoding.encode_ordinary(context)
    n_context = len(os.path.commonprefix([tokens, before]))
    return (tokens, n_context) if n_context else ([encoding.eot_token, *tokens], 1)


def windows(tokens: list[int], n_context: int, block_size: int) -> Iterator[tuple[list[int], int]]:
    """Pieces of up to block_size + 1 tokens that score the last so many, each after all that fits."""
    for done in range(n_context, len(tokens), block_size):
        end = min(len(tokens), done + block_size)
        yield tokens[max(0, end - block_size - 1) : end], end - done


def batches_alike(lengths: list[int], kinds: list, size: int) -> tqdm:
    """Numbers of texts of one kind and of similar length, `size` at a time, the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: (kinds[i], -lengths[i]))
    groups = [list(group) for _, group in itertools.groupby(order, kinds.__getitem__)]
    batches = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    return tqdm(batches, unit="batch", disable=None)


class Scorer:
    """Answers lm-eval's requests (tuples of texts in `args`), in their order, whatever the batches.

    Texts of similar length make a ragged batch, so nothing is padded. Rule "top-k" scores as trained, by
    choices that look ahead, and batches texts of one length alone. Generation is causal in any case.
    """

    def __init__(self, model: MoR, encoding: tiktoken.Encoding, batch_size: int, rule: str, depth: int):
        super().__init__()  # lm-eval's own, where this is joined with its class
        self.model, self.encoding, self.batch_size = model, encoding, batch_size
        self.rule, self.max_depth = rule, depth
        self.usable = torch.from_numpy(usable_ids(encoding)).to(model.cos.device)

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """Of (context, continuation): how likely the continuation is, in nats, and whether it is greedy.

        A context that does not fit before it loses its beginning.
        """
        return self.score([encode_pair(self.encoding, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Of (text,): how likely it is as a whole document, in windows that touch."""
        found = self.score([encode_pair(self.encoding, "", *request.args) for request in requests])
        return [log_p for log_p, _ in found]

    def score(self, texts: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Of (tokens, size of the context): the others' log-probability; if each is the likeliest."""
        size, results = self.model.config.block_size, [(0.0, True)] * len(texts)
        found = [(n, *window) for n, text in enumerate(texts) for window in windows(*text, size)]
        lengths = [len(tokens) for _, tokens, _ in found]
        kinds = lengths if self.rule == "top-k" else [0] * len(found)
        for batch in batches_alike(lengths, kinds, self.batch_size):
            numbers, tokens, counts = zip(*(found[i] for i in batch))
            for n, log_p, greedy in zip(numbers, *self.score_batch(tokens, counts)):
                results[n] = results[n][0] + log_p, results[n][1] and greedy
        return results

    @torch.no_grad()
    def score_batch(self, texts: list[list[int]], counts: list[int]) -> tuple[list[float], list[bool]]:
        """The same of the last tokens of each text, as many as `counts` says, in one pass."""
        device, lengths = self.model.cos.device, [len(tokens) - 1 for tokens in texts]
        ends = list(itertools.accumulate(lengths))
        ids = torch.tensor([token for tokens in texts for token in tokens[:-1]], device=device)
        one_length = lengths[0] if len(set(lengths)) == 1 else None
        rows = ragged_batch(torch.tensor([0, *ends], device=device), one_length)
        x, _ = self.model.hidden(ids, rows, self.rule, self.max_depth)
        x = x[[row for end, n in zip(ends, counts) for row in range(end - n, end)]]
        targets = [token for tokens, n in zip(texts, counts) for token in tokens[-n:]]
        targets, log_p, greedy = torch.tensor(targets, device=device), [], []
        chunk = max(1, CHUNK_LOGITS // self.model.config.vocab_size)
        for xs, ys in zip(x.split(chunk), targets.split(chunk)):
            logits = self.model.logits(xs)
            log_p.append(logits.log_softmax(1).gather(1, ys[:, None]).squeeze(1))
            # Generation never says a token without text, however likely.
            best = logits[:, : len(self.usable)].masked_fill(~self.usable, -math.inf).argmax(1)
            greedy.append(best == ys)
        log_p, greedy = torch.cat(log_p).cpu().double().split(counts), torch.cat(greedy).split(counts)
        return [one.sum().item() for one in log_p], [one.all().item() for one in greedy]

    def generate_until(self, requests) -> list[str]:
        """Of (context, settings): the greedy continuation, up to one of the texts under "until".

        A context loses its beginning where the new tokens would not fit, but half a block of it stays.
        """
        c, asked = self.model.config, []
        engine = Engine(
            self.model, max_batch=self.batch_size, encoding=self.encoding, max_depth=self.max_depth
        )
        for context, given in (request.args for request in requests):
            if given.get("do_sample", given.get("temperature")):
                raise ValueError("a task asks for sampled texts, but these are greedy; leave it out.")
            until, n_new = given.get("until") or [], int(given.get("max_gen_toks", 256))
            until = tuple(filter(None, [until] if isinstance(until, str) else until))
            keep = max(1, c.block_size // 2, c.block_size + 1 - n_new)
            prompt = self.encoding.encode_ordinary(context)[-keep:] or [self.encoding.eot_token]
            engine.submit(prompt, SamplingParams(n_new, temperature=0, stop=until))
            asked.append((len(prompt), until))
        tokens = [[] for _ in requests]
        with tqdm(total=len(requests), unit="text", disable=None) as bar:
            for event in engine.stream():
                tokens[event.request].append((event.token, None))
                bar.update(event.ends)
        return [
            "".join(text for text, _ in pieces(new[n:], self.encoding, 0, until))
            for new, (n, until) in zip(tokens, asked)
        ]


def paper_figures(results: dict) -> dict[str, float]:
    """The paper's figures in percent, as far as found, and once all are, their mean with ARC as one."""
    found = {k: 100 * results[k][f"{metric},none"] for k, metric in PAPER.items() if k in results}
    if len(found) == len(PAPER):
        arc = (found["arc_easy"] + found["arc_challenge"]) / 2
        found["mean"] = (sum(found.values()) - arc) / (len(PAPER) - 1)
    return found


def run_tasks(
    args: argparse.Namespace, state: dict, model: MoR, encoding: tiktoken.Encoding, depth: int
) -> None:
    """Runs lm-eval's tasks, prints its table, and writes what it found beside the checkpoint."""
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        raise ValueError(f"--tasks needs lm-eval ({error}); run: pip install lm-eval.") from None

    class Tasks(TaskManager):
        def load(self, *given):
            try:
                return super().load(*given)
            except Exception as error:  # many kinds: unknown names, bad files, no network
                reason = " ".join(str(error).split())[:200]
                raise ValueError(
                    f"--tasks={args.tasks} cannot be loaded ({type(error).__name__}: {reason}); "
                    "`lm-eval ls tasks` lists what there is, and data not yet here needs a network."
                ) from None

    names = [name for task in args.tasks.split(",") for name in (PAPER if task == "paper" else [task])]
    rule = args.rule or "causal"
    adapter = type("Adapter", (Scorer, LM), {})(model, encoding, args.batch_size, rule, depth)
    try:
        found = lm_eval.simple_evaluate(
            adapter, tasks=names, num_fewshot=args.num_fewshot, limit=args.limit, log_samples=False,
            task_manager=Tasks(include_path=args.include_path),
        )  # fmt: skip
    except ValueError as error:
        if "larger than population" not in str(error):  # what Python says of a draw of examples
            raise
        raise ValueError(
            f"num_fewshot={args.num_fewshot} is more than a task has examples; give fewer."
        ) from None
    print(f"{args.checkpoint}, step {state['step']}, rule {rule}, max depth {depth}")
    print(make_table(found) + ("\n" + make_table(found, "groups") if found.get("groups") else ""))
    if paper := paper_figures(found["results"]):
        print("as the paper reports, in %: " + ", ".join(f"{k} {v:.1f}" for k, v in paper.items()))
    facts = {"checkpoint": str(args.checkpoint), "step": state["step"], "rule": rule, "max_depth": depth}
    facts |= {"limit": args.limit, "lm_eval": lm_eval.__version__, "paper": paper}
    facts |= {k: found.get(k) for k in ("results", "groups", "versions", "n-shot", "n-samples")}
    with whole_file(args.output.resolve()) as file:
        file.write(json.dumps(facts, indent=2, default=str).encode() + b"\n")
    print(f"written to {args.output}")


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as that goes without the checkpoint."""

    def refuse(message: str):
        raise ValueError(f"{message}; --help lists what there is.")

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("out/checkpoint.pt"), help="out/checkpoint.pt")
    add("--rule", choices=("top-k", "causal"), help="of expert-choice; none: both, causal for tasks")
    add("--max_depth", default="0", help="most recursion steps of a token; 0: all; all: each number")
    add("--batch_size", type=int, default=0, help="sequences per pass; 0: as in training")
    add("--device", default="auto", help="cpu, cuda, cuda:1, …; auto: the GPU if there is one")
    add("--dataset", metavar="NAME", help="folder below data/; none: that of the training")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--eval_iters", type=int, help="validation batches; none: as in training")
    either("--all", action="store_true", default=None, help="the whole validation split")
    add("--tasks", metavar="NAME,…", help="benchmarks of lm-eval instead; paper: the paper's seven")
    add("--num_fewshot", type=int, help="examples before a question; none: what the task says")
    add("--limit", type=int, help="documents per task; none: all")
    add("--include_path", metavar="FOLDER", help="where more tasks (yaml files) are")
    add("--output", type=Path, metavar="FILE", help="none: benchmarks.json beside the checkpoint")
    a = parser.parse_args(argv)
    others = "dataset eval_iters all" if a.tasks else "num_fewshot limit include_path output"
    if strange := [name for name in others.split() if getattr(a, name) is not None]:
        refuse(f"{' and '.join(strange)} {'is not for' if a.tasks else 'needs'} --tasks")
    for name, least in {"batch_size": 0, "eval_iters": 1, "limit": 1, "num_fewshot": 0}.items():
        if getattr(a, name) is not None and getattr(a, name) < least:
            raise ValueError(f"{name}={getattr(a, name)} must be at least {least}.")
    if a.batch_size > MOST_PASSES:
        raise ValueError(f"batch_size={a.batch_size} must be at most {MOST_PASSES}.")
    if not (a.max_depth.isdecimal() or a.max_depth == "all" and not a.tasks):
        raise ValueError(f"max_depth={a.max_depth} must be a number{', or all' * (not a.tasks)}.")
    if not Path(a.include_path or ".").is_dir():
        raise ValueError(f"include_path={a.include_path} is no folder; give one with yaml files.")
    a.output = a.output or a.checkpoint.parent / "benchmarks.json"
    if a.tasks and (a.output.exists() or not a.output.parent.is_dir()):
        raise ValueError(f"{a.output} exists, or its folder does not; give another --output.")
    if a.tasks and not os.access(a.output.parent, os.W_OK):
        raise ValueError(f"{a.output.parent} cannot be written to; give another --output.")
    return a


def evaluate(args: argparse.Namespace) -> None:
    """Prints what is asked of the checkpoint, computed in the dtype of its training."""
    device, keys = pick_device(args.device), (*checkpoint.KEYS, "settings", "data")
    state, model, encoding = checkpoint.load_trained(args.checkpoint, device, keys)
    with checkpoint.this_version():
        t = build(state["settings"])[1]
    args.batch_size = args.batch_size or t.batch_size or 8
    bfloat16 = t.dtype == "bfloat16" or (t.dtype == "auto" and device.startswith("cuda"))
    n_recursion, given = model.config.n_recursion, args.max_depth
    depths = range(1, n_recursion + 1) if given == "all" else [int(given) or n_recursion]
    if max(depths) > n_recursion:
        raise ValueError(f"max_depth={given} is more than the model's n_recursion={n_recursion}.")
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bfloat16):
        if args.tasks:
            run_tasks(args, state, model, encoding, depths[0])
        else:
            print_validation(args, state, model, encoding, t, depths)


def main(argv: list[str] | None = None) -> int:
    return exit_status(lambda: evaluate(read_arguments(argv)), instead="a smaller --batch_size")


if __name__ == "__main__":
    sys.exit(main())
