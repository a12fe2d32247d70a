"""The model against a second one, written token by token in float64 and sharing only its weights.

`Naive` runs one sequence with loops over positions and dictionaries of keys: slow, with nothing ragged,
padded or batched, so that whatever model.py does to be fast has to come out the same. Below it:
shared weights, capacity warm-up, the chunked loss, bfloat16 and torch.compile.
"""

import copy
import math
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_file
from model import MoR, lm_loss
from modelconfig import ModelConfig

# ---- the naive model -----------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive_plan(c) -> list[tuple[int, int | None]]:
    """(physical layer, recursion step) of each unrolled layer."""
    inner = c.n_layer - 2 if c.sharing.startswith("middle") else c.n_layer
    block = inner // c.n_recursion
    if c.sharing == "none":
        plan = [(i, 0) for i in range(inner)]
    elif "cycle" in c.sharing:
        plan = [(i % block, i // block) for i in range(inner)]
    else:
        plan = [(i // c.n_recursion, i % c.n_recursion) for i in range(inner)]
    if c.sharing.startswith("middle"):
        plan = [(0, None), *((p + 1, step) for p, step in plan), (block + 1, None)]
    return plan


class Naive:
    """One sequence through a model, position by position."""

    def __init__(self, model: MoR, ids, rule: str, max_depth=None, capacity=None):
        self.c = c = model.config
        self.w = {n: t.detach().double().numpy() for n, t in model.state_dict().items()}
        self.plan = naive_plan(c)
        self.max_depth = max_depth or c.n_recursion
        self.capacity = capacity or c.capacity
        self.stored = {}  # physical layer -> {position: (keys, values)} of its first use
        self.margin = math.inf  # how close a choice was; float32 may decide otherwise below 1e-6
        self.scored = []  # expert-choice: per step {position: (logit, causal logit, gate, taken)}
        self.depth = [0] * len(ids)
        embedding = self.w["model.embed_tokens.weight"]
        x = [embedding[int(i)] for i in ids]
        everyone = list(range(len(ids)))
        if c.routing == "none":
            for n, (_, step) in enumerate(self.plan):
                if step is None or step < self.max_depth:
                    x = self.layer(n, x, everyone)
            self.depth = [self.max_depth] * len(ids)
        else:
            outer = c.sharing.startswith("middle")
            if outer:
                x = self.layer(0, x, everyone)
            x = self.expert(x, rule) if c.routing == "expert" else self.token(x)
            if outer:
                x = self.layer(len(self.plan) - 1, x, everyone)
        self.x = [self.norm(row, "model.norm") for row in x]
        self.logits = np.array([embedding @ row for row in self.x])

    def norm(self, x, name):
        return x / math.sqrt((x**2).mean() + self.c.norm_eps) * self.w[name + ".weight"]

    def rope(self, x, position):
        """Turns every pair (x[j], x[j + D/2]) of a head by position * theta^(-2j/D)."""
        half = len(x) // 2
        out = x.copy()
        for j in range(half):
            angle = position * self.c.rope_theta ** (-2 * j / len(x))
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    def heads(self, x, name, position=None):
        heads = (self.w[name + ".weight"] @ x).reshape(-1, self.c.n_embd // self.c.n_head)
        return heads if position is None else np.array([self.rope(h, position) for h in heads])

    def layer(self, n, x, active):
        """Unrolled layer n on the active positions alone; x has a row for every position."""
        physical, c = self.plan[n][0], self.c
        name = f"model.layers.{physical}"
        first = [p for p, _ in self.plan].index(physical) == n
        normed = {t: self.norm(x[t], name + ".input_layernorm") for t in active}
        own = {}
        if first or c.kv_mode != "shared":
            for t in active:
                k = self.heads(normed[t], name + ".self_attn.k_proj", t)
                own[t] = k, self.heads(normed[t], name + ".self_attn.v_proj")
        if first:
            self.stored[physical] = own
        keys = own if c.kv_mode == "recursion" else {**self.stored[physical], **own}
        out = list(x)
        for t in active:
            q = self.heads(normed[t], name + ".self_attn.q_proj", t)
            visible = [j for j in sorted(keys) if j <= t]
            mixed = []
            for head in range(c.n_head):
                kv_head = head // (c.n_head // c.n_kv_head)
                score = np.array([q[head] @ keys[j][0][kv_head] for j in visible]) / math.sqrt(
                    len(q[head])
                )
                weight = np.exp(score - score.max())
                mixed.append(
                    sum(a * keys[j][1][kv_head] for a, j in zip(weight / weight.sum(), visible))
                )
            y = x[t] + self.w[name + ".self_attn.o_proj.weight"] @ np.concatenate(mixed)
            h = self.norm(y, name + ".post_attention_layernorm")
            gate, up = (self.w[f"{name}.mlp.{part}_proj.weight"] @ h for part in ("gate", "up"))
            out[t] = y + self.w[name + ".mlp.down_proj.weight"] @ (gate * sigmoid(gate) * up)
        return out

    def block(self, step, x, active):
        for n, (_, s) in enumerate(self.plan):
            if s == step:
                x = self.layer(n, x, active)
        return x

    def route(self, name, x):
        x = x / self.c.router_temperature
        if self.c.router_type == "linear":
            return self.w[name + ".weight"] @ x
        h = self.w[name + ".0.weight"] @ x
        gelu = np.array([0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in h])
        return self.w[name + ".2.weight"] @ gelu

    def expert(self, x, rule):
        c, active = self.c, list(range(len(x)))
        for r in range(self.max_depth):
            squash = {"sigmoid": sigmoid, "tanh": np.tanh}[c.router_func]
            logit = {t: self.route(f"router.{r}", x[t])[0] for t in active}
            gate = {t: c.alpha * squash(logit[t]) for t in active}
            causal = logit
            if c.sampling == "aux_router":
                causal = {t: self.route(f"aux_router.{r}", x[t])[0] for t in active}
            if rule == "top-k":
                k = max(1, math.floor(self.capacity[r] * len(x)))
                best = sorted(active, key=lambda t: (-gate[t], t))
                taken = sorted(best[:k])
                if k < len(best):
                    self.margin = min(self.margin, (gate[best[k - 1]] - gate[best[k]]) / c.alpha)
            else:
                taken = [t for t in active if causal[t] >= 0 or c.capacity[r] == 1]
            self.margin = min(self.margin, *(abs(causal[t]) for t in active))
            self.scored.append({t: (logit[t], causal[t], gate[t], t in taken) for t in active})
            if not taken:
                break
            y, active = self.block(r, x, taken), taken
            x = [x[t] + gate[t] * y[t] if t in taken else x[t] for t in range(len(x))]
            for t in taken:
                self.depth[t] = r + 1
        return x

    def token(self, x):
        c = self.c
        self.router = [self.route("router.0", row) for row in x]
        if c.router_func == "softmax":
            self.p = [c.alpha * np.exp(s - s.max()) / np.exp(s - s.max()).sum() for s in self.router]
        else:
            self.p = [c.alpha * sigmoid(s) for s in self.router]
        bias = self.w.get("router.0.balance_bias", np.zeros(c.n_recursion))
        self.choice = [int((p + bias).argmax()) for p in self.p]
        for p in self.p if c.n_recursion > 1 else []:
            second, first = sorted(p + bias)[-2:]
            self.margin = min(self.margin, (first - second) / c.alpha)
        self.depth = [min(e, self.max_depth - 1) + 1 for e in self.choice]
        h, out = x, list(x)
        for r in range(self.max_depth):
            active = [t for t in range(len(x)) if self.depth[t] > r]
            h = self.block(r, h, active)
            for t in active:
                if self.depth[t] == r + 1:
                    out[t] = x[t] + self.p[t][self.choice[t]] * h[t]
        return out


def naive_pass(model: MoR, ids, targets, rule: str, max_depth=None, capacity=None):
    """Loss and figures of a batch, as MoR.forward gives them, and each sequence's own pass."""
    c, n_recursion = model.config, model.config.n_recursion
    runs = [Naive(model, row, rule, max_depth, capacity) for row in ids]
    losses = []
    for run, row in zip(runs, targets):
        for logit, target in zip(run.logits, row.tolist()):
            if target != -100:
                losses.append(np.logaddexp.reduce(logit) - logit[target])
    figures = {"lm_loss": np.mean(losses)}
    figures["active"] = [np.mean([d > r for run in runs for d in run.depth]) for r in range(n_recursion)]
    coefficient = {"lm_loss": 1, "z_loss": c.z_coeff, "balance_loss": c.balance_coeff}
    if c.routing == "expert" and rule == "top-k":
        coefficient["aux_loss"] = c.aux_coeff
        steps = [[s for run in runs for s in run.scored[r].values()] for r in range(len(runs[0].scored))]
        figures["z_loss"] = sum(np.mean([s**2 for s, _, _, _ in step]) for step in steps)
        if c.sampling != "none":
            figures["aux_loss"] = sum(
                np.mean([-np.log(sigmoid(s if taken else -s)) for _, s, _, taken in step])
                for step in steps
            )
        figures["accuracy"] = [
            np.mean([taken == (s >= 0 or c.capacity[r] == 1) for _, s, _, taken in step])
            for r, step in enumerate(steps)
        ]
        figures["gate"] = [np.mean([g for _, _, g, taken in step if taken]) for step in steps]
        last = {t for run in runs for t, s in run.scored[-1].items() if s[3]}
        figures["dead"] = 1 - len(last) / ids.shape[1]
    if c.routing == "token":
        logits, p = (np.concatenate([getattr(run, a) for run in runs]) for a in ("router", "p"))
        choices = [e for run in runs for e in run.choice]
        counts = np.array([choices.count(r) for r in range(n_recursion)])
        figures["counts"], figures["load"] = counts, counts / len(choices)
        figures["max_vio"] = (counts.max() - counts.mean()) / counts.mean()
        share = p.mean(0) / p.mean(0).sum()
        figures["entropy"] = -sum(a * math.log(a) for a in share)
        figures["z_loss"] = np.mean(np.logaddexp.reduce(logits, 1) ** 2)
        if c.balancing == "loss":
            f = counts / len(choices)
            figures["balance_loss"] = n_recursion * sum(
                f[i] * p[:, i].mean() for i in range(n_recursion)
            )
    total = sum(weight * figures[name] for name, weight in coefficient.items() if name in figures)
    return total, figures, runs


# ---- random models -------------------------------------------------------------------------------

CELLS = [
    (sharing, routed, kv_mode)
    for sharing in ("none", "cycle", "middle_cycle", "sequence", "middle_sequence")
    for routed in ("none", "expert", "token")
    for kv_mode in ("recursion", "shared", "shared_update")
    if (routed == "none" or sharing.endswith("cycle"))
    and (sharing != "none" or kv_mode == "recursion")
    and (routed != "none" or kv_mode != "shared_update")
]


def random_config(
    draw: random.Random, sharing="middle_cycle", routed="expert", kv_mode="recursion", **fixed
):
    n_recursion = 1 if sharing == "none" else draw.randint(1, 4)
    n_kv_head, group = draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    n_head = n_kv_head * group
    given = dict(
        vocab_size=draw.randint(2, 40),
        block_size=16,
        n_layer=draw.randint(1, 2) * n_recursion + 2 * sharing.startswith("middle"),
        n_head=n_head,
        n_kv_head=n_kv_head,
        n_embd=n_head * draw.choice((2, 4, 6)),
        n_ffn=draw.randint(1, 20),
        rope_theta=draw.choice((100.0, 10000.0)),
        norm_eps=draw.choice((1e-5, 1e-2)),
        sharing=sharing,
        n_recursion=n_recursion,
        routing=routed,
        kv_mode=kv_mode,
        z_coeff=draw.choice((0.0, 1e-2)),
    )
    if routed != "none":
        given["router_type"] = draw.choice(("linear", "mlp", "wide_mlp"))
        given["router_temperature"] = draw.choice((1.0, 0.5, 3.0))
        given["alpha"] = draw.choice((0.0, 0.7))
    if routed == "expert":
        given["router_func"] = draw.choice(("sigmoid", "tanh"))
        given["sampling"] = draw.choice(("aux_loss", "aux_router", "none"))
        given["aux_coeff"] = draw.choice((0.001, 0.3))
        if draw.random() < 0.6:
            shares = sorted((draw.uniform(0.01, 1) for _ in range(n_recursion)), reverse=True)
            if kv_mode != "recursion" or draw.random() < 0.3:
                shares[0] = 1.0
            given["capacity"] = tuple(shares)
    if routed == "token":
        given["router_func"] = draw.choice(("softmax", "sigmoid"))
        given["balancing"] = draw.choice(("loss", "loss_free", "none"))
    return ModelConfig(**given | fixed)


def random_model(config: ModelConfig, seed: int) -> MoR:
    """Weights large enough for attention, norms and routers to matter."""
    torch.manual_seed(seed)
    model = MoR(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
        elif "router" in name:
            torch.nn.init.normal_(p, std=1.5 / math.sqrt(p.shape[1]))
        else:
            torch.nn.init.normal_(p, std=1.0 / math.sqrt(p.shape[1]))
    if config.routing == "token" and config.balancing == "loss_free":
        model.router[0].balance_bias.uniform_(-0.05, 0.05)
    return model


def random_batch(config: ModelConfig, draw: random.Random, n_seq=None, length=None):
    """Ids and targets, some of which are ignored (never all)."""
    shape = n_seq or draw.randint(1, 3), length or draw.randint(1, 13)
    ids = torch.tensor(
        [[draw.randrange(config.vocab_size) for _ in range(shape[1])] for _ in range(shape[0])]
    )
    targets = torch.tensor(
        [[-100 if draw.random() < 0.2 else draw.randrange(config.vocab_size) for _ in r] for r in ids]
    )
    targets[0, 0] = 0
    return ids, targets


# ---- the whole model -----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("sharing, routed, kv_mode", CELLS)
def test_equals_the_naive_model(sharing, routed, kv_mode):
    """Loss, figures and depths, and the state and logits of every single position."""
    draw = random.Random(f"{sharing} {routed} {kv_mode}")
    compared = 0
    for seed in range(18 if routed != "none" else 8):
        config = random_config(draw, sharing, routed, kv_mode)
        model = random_model(config, seed)
        ids, targets = random_batch(config, draw)
        rule = draw.choice(("top-k", "top-k", "causal"))
        max_depth = draw.choice((None, None, draw.randint(1, config.n_recursion)))
        expected_total, expected, runs = naive_pass(model, ids, targets, rule, max_depth)
        if min(run.margin for run in runs) < 1e-6:
            continue  # float32 may choose otherwise
        compared += 1
        total, figures = model(ids, targets, rule=rule, max_depth=max_depth)
        assert total.item() == pytest.approx(expected_total, rel=2e-5, abs=2e-5), config
        assert figures.keys() == expected.keys(), config
        for name, value in expected.items():
            np.testing.assert_allclose(figures[name], value, 2e-5, 2e-5, err_msg=f"{name} {config}")
        n_seq, length = ids.shape
        rows = model_file.ragged_batch(torch.arange(n_seq + 1) * length, length)
        x, routed_as = model.hidden(ids.flatten(), rows, rule=rule, max_depth=max_depth)
        assert routed_as.depth.tolist() == [d for run in runs for d in run.depth]
        for actual, part in ((x, "x"), (model.logits(x), "logits")):
            wanted = np.concatenate([getattr(run, part) for run in runs])
            np.testing.assert_allclose(actual, wanted, 1e-4, 2e-5 * abs(wanted).max())
    assert compared >= 7


@torch.no_grad()
@pytest.mark.parametrize("routed", ["none", "expert", "token"])
def test_each_sequence_of_a_batch_is_on_its_own(routed):
    """A batch gives every sequence the loss it has alone."""
    draw = random.Random(routed)
    for seed in range(5):
        model = random_model(random_config(draw, routed=routed), seed)
        ids, targets = random_batch(model.config, draw, n_seq=4)
        targets = targets.clamp(min=0)  # as many in every sequence, so the mean of means is the mean
        alone = [model(ids[b : b + 1], targets[b : b + 1])[1]["lm_loss"] for b in range(4)]
        together = model(ids, targets)[1]["lm_loss"]
        assert together.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-5, abs=1e-6)


@torch.no_grad()
def test_causal_evaluation_does_not_look_ahead_and_top_k_does():
    draw, leaks = random.Random(0), 0
    for seed in range(10):
        config = random_config(draw, n_recursion=3, n_layer=8, capacity=(0.9, 0.5, 0.25), vocab_size=30)
        model = random_model(config, seed)
        ids, _ = random_batch(config, draw, n_seq=2, length=12)
        changed = ids.clone()
        changed[:, 6:] = (ids[:, 6:] + 1 + seed) % 30
        rows = model_file.ragged_batch(torch.arange(3) * 12, 12)
        for rule in ("top-k", "causal"):
            a, b = (
                model.hidden(i.flatten(), rows, rule=rule)[0].view(2, 12, -1) for i in (ids, changed)
            )
            difference = (a - b)[:, :6].abs().max()
            if rule == "causal":
                assert difference < 1e-5
            leaks += rule == "top-k" and difference > 1e-3
        assert (a - b)[:, 6:].abs().max() > 1e-3
    assert leaks > 0


@torch.no_grad()
def test_random_router_takes_the_best_scores_and_gates_by_them():
    config = ModelConfig(
        n_embd=24, n_head=2, n_ffn=8, vocab_size=30, router_type="random", sampling="none", block_size=32
    )
    model = random_model(config, 0).eval()
    ids = torch.randint(0, 30, (3, 30))
    torch.manual_seed(5)
    _, figures = model(ids, ids)
    torch.manual_seed(5)
    in_play = [[*range(30)] for _ in ids]
    for r, k in enumerate((30, 20, 10)):
        drawn = torch.rand(sum(map(len, in_play))).view(len(ids), -1).tolist()
        best = [sorted(zip(scores, rows), reverse=True)[:k] for scores, rows in zip(drawn, in_play)]
        in_play = [sorted(t for _, t in pairs) for pairs in best]
        taken = [score for pairs in best for score, _ in pairs]
        assert figures["gate"][r].item() == pytest.approx(0.1 * np.mean(taken))
    last = set(sum(in_play, []))  # sequences differ, so together they reach more than 10 positions
    assert len(last) > 10 and figures["dead"].item() == pytest.approx(1 - len(last) / 30)
    assert not [n for n, _ in model.named_parameters() if "router" in n]
    torch.manual_seed(5)
    first = model.train()(ids, ids)[0]
    second = model(ids, ids)[0]
    torch.manual_seed(5)
    assert model(ids, ids)[0] == first != second


@torch.no_grad()
@pytest.mark.parametrize("routed", ["none", "expert", "token"])
@pytest.mark.parametrize("rule", ["top-k", "causal"])
def test_documents_attend_to_themselves(routed, rule):
    """Under rules that look at single tokens, a document has the loss that it has alone; top-k picks
    among all tokens of a sequence as before."""
    draw = random.Random(f"documents {routed}")
    for seed in range(4):
        config = random_config(draw, routed=routed)
        model = random_model(config, seed).eval()
        ids, targets = random_batch(config, draw, n_seq=3, length=12)
        targets = targets.clamp(min=0)
        cuts = sorted(draw.sample([t for t in range(1, 36) if t % 12], 5))
        documents = torch.tensor(sorted([0, 12, 24, 36, *cuts]))
        _, figures = model(ids, targets, rule, documents=documents)
        if routed == "expert" and rule == "top-k":
            shares = [max(1, int(c * 12)) / 12 for c in model.capacity]
            assert figures["active"].tolist() == pytest.approx(shares)
            continue
        total = 0.0
        for begin, end in zip(documents[:-1], documents[1:]):
            one = ids.flatten()[None, begin:end], targets.flatten()[None, begin:end]
            total += model(*one, rule)[1]["lm_loss"].item() * int(end - begin)
        assert figures["lm_loss"].item() == pytest.approx(total / 36, rel=1e-5)


@pytest.mark.parametrize("max_depth", [0, 4, -1])
def test_impossible_depths_are_refused(max_depth):
    model = MoR(ModelConfig(n_embd=24, n_head=2, n_ffn=8))
    with pytest.raises(ValueError, match=r"between 1 and n_recursion=3"):
        model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), max_depth=max_depth)


# ---- shared weights ------------------------------------------------------------------------------


def test_a_physical_layer_is_stored_once():
    """What else is stored, test_flops.py counts."""
    draw = random.Random(1)
    for sharing, routed, kv_mode in CELLS:
        config = random_config(draw, sharing, routed, kv_mode)
        model = MoR(config)
        assert len(model.model["layers"]) == len({p for p, _ in naive_plan(config)})
        stored = list(model.parameters())
        assert len({p.untyped_storage().data_ptr() for p in stored}) == len(stored)


@pytest.mark.parametrize("sharing, routed, kv_mode", [c for c in CELLS if c[0] != "none"])
def test_gradient_of_a_shared_layer_is_the_sum_over_its_uses(sharing, routed, kv_mode):
    draw = random.Random(3)
    for seed in range(2):
        n_recursion = 3
        config = random_config(
            draw, sharing, routed, kv_mode, n_recursion=n_recursion, capacity=(), z_coeff=0.01,
            n_layer=6 + 2 * sharing.startswith("middle"),
        )  # fmt: skip
        model = random_model(config, seed)
        ids, targets = random_batch(config, draw, n_seq=2, length=12)
        apart = copy.deepcopy(model)  # a copy of the weights for every unrolled layer
        plan = config.plan
        apart.model["layers"] = torch.nn.ModuleList(
            copy.deepcopy(model.model["layers"][p]) for p in plan
        )
        apart.config.plan = list(range(config.n_layer))
        loss, _ = model(ids, targets)
        apart_loss, _ = apart(ids, targets)
        assert loss.item() == pytest.approx(apart_loss.item(), abs=1e-6)
        loss.backward()
        apart_loss.backward()
        for physical, layer in enumerate(model.model["layers"]):
            uses = [apart.model["layers"][n] for n, p in enumerate(plan) if p == physical]
            for name, p in layer.named_parameters():
                gradients = [dict(use.named_parameters())[name].grad for use in uses]
                # Nobody reads the keys of a later use of a layer that shares its first one's.
                total = sum(g for g in gradients if g is not None)
                assert (p.grad - total).norm() <= 1e-5 * total.norm() + 1e-7, (physical, name)


def test_every_parameter_learns():
    """No weight is left out of the loss by any kind of model."""
    draw = random.Random(8)
    for sharing, routed, kv_mode in CELLS:
        n_recursion = 1 if sharing == "none" else 3
        config = random_config(
            draw, sharing, routed, kv_mode, n_recursion=n_recursion, sampling="aux_router", capacity=(),
            n_layer=6 + 2 * sharing.startswith("middle"), router_func="",
        )  # fmt: skip
        model = random_model(config, 1)
        ids, targets = random_batch(config, draw, n_seq=3, length=13)
        model(ids, targets)[0].backward()
        for name, p in model.named_parameters():
            unused = routed == "token" and "layers" in name  # a depth that no token chose
            assert p.grad is not None and (unused or p.grad.abs().max() > 0), (name, config)


@pytest.mark.parametrize("sampling", ["aux_loss", "aux_router"])
def test_the_auxiliary_router_does_not_steer_the_model(sampling):
    """Its loss ends at its own weights; the main router's own loss goes through into the model."""
    gradients = []
    for coefficient in (0.0, 10.0):
        draw = random.Random(9)
        config = random_config(
            draw, sampling=sampling, aux_coeff=coefficient, n_recursion=3, n_layer=8, capacity=(),
            router_type="linear",
        )  # fmt: skip
        model = random_model(config, 2)
        ids, targets = random_batch(config, draw, n_seq=2, length=12)
        model(ids, targets)[0].backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    changed = {n for n, g in gradients[0].items() if not torch.equal(g, gradients[1][n])}
    if sampling == "aux_router":
        assert changed == {f"aux_router.{r}.weight" for r in range(3)}
    else:
        assert changed >= {f"router.{r}.weight" for r in range(3)}
        assert changed >= {n for n in gradients[0] if n.startswith(("model.layers.0", "model.embed"))}


# ---- capacity warm-up ----------------------------------------------------------------------------


def test_capacity_falls_along_half_a_cosine():
    model = MoR(ModelConfig(n_embd=24, n_head=2, n_ffn=8, capacity=(1, 0.6, 0.2), capacity_warmup=100))
    assert model.capacity == (1, 0.6, 0.2)
    half = math.sqrt(0.125)
    for passes, share in {
        0: 1,
        25: 0.5 + half,
        50: 0.5,
        75: 0.5 - half,
        100: 0,
        101: 0,
        10**9: 0,
    }.items():
        model.warm_up_capacity(passes)
        assert model.capacity == pytest.approx((1, 0.6 + 0.4 * share, 0.2 + 0.8 * share))
    track = []
    for passes in range(102):
        model.warm_up_capacity(passes)
        track.append(model.capacity[2])
        assert model.capacity[0] == 1
    assert track == sorted(track, reverse=True) and len(set(track)) == 101


@torch.no_grad()
def test_training_takes_as_many_tokens_as_the_capacity_of_the_moment():
    draw = random.Random(4)
    config = random_config(
        draw, n_recursion=3, n_layer=5, capacity=(0.9, 0.6, 0.2), capacity_warmup=10, vocab_size=20
    )
    model = random_model(config, 0)
    ids, targets = random_batch(config, draw, n_seq=2, length=13)
    for passes in (0, 3, 5, 8, 10, 50):
        model.warm_up_capacity(passes)
        total, figures = model(ids, targets)
        k = [max(1, math.floor(c * 13)) for c in model.capacity]
        assert (figures["active"] * 13).tolist() == pytest.approx(k)
        expected_total, expected, runs = naive_pass(model, ids, targets, "top-k", None, model.capacity)
        assert min(run.margin for run in runs) > 1e-6
        assert total.item() == pytest.approx(expected_total, abs=2e-5)
        np.testing.assert_allclose(figures["accuracy"], expected["accuracy"], atol=1e-6)
    assert k == [11, 7, 2]


@torch.no_grad()
def test_a_step_takes_one_token_at_least():
    config = ModelConfig(n_embd=24, n_head=2, n_ffn=8, capacity=(1, 0.01, 0.01))
    _, figures = MoR(config)(torch.arange(20)[None], torch.arange(20)[None])
    assert (figures["active"] * 20).round().tolist() == [20, 1, 1]
    assert figures["dead"].item() == pytest.approx(0.95)


# ---- the chunked loss ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_logits", [1, 31 * 3, 31 * 7, 31 * 7 + 30, 31 * 21, 2**25])
def test_chunked_loss_equals_cross_entropy(monkeypatch, dtype, chunk_logits):
    """21 rows in chunks of 1, 3 and 7, one just short of 8, and all at once."""
    monkeypatch.setattr(model_file, "CHUNK_LOGITS", chunk_logits)
    for seed in range(4):
        torch.manual_seed(seed)
        x = (2 * torch.randn(21, 10, dtype=dtype)).requires_grad_()
        head = torch.randn(31, 10, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, 31, (21,))
        targets[torch.rand(21) < (0.0, 0.3, 0.9, 0.0)[seed]] = -100
        targets[0] = 30
        loss = lm_loss(x, head, targets)
        (3 * loss).backward()
        gradients = x.grad, head.grad
        x.grad = head.grad = None
        expected = F.cross_entropy(x @ head.T, targets, ignore_index=-100)
        (3 * expected).backward()
        torch.testing.assert_close(loss.double(), expected.double(), rtol=2e-6, atol=0)
        for actual, grad in zip(gradients, (x.grad, head.grad)):
            torch.testing.assert_close(actual, grad, rtol=0, atol=2e-6 * grad.abs().max().item())
        assert (gradients[0][targets == -100] == 0).all()


def test_chunked_loss_gives_the_head_its_gradient_also_alone():
    x, head = torch.randn(9, 6), torch.randn(12, 6, requires_grad=True)
    targets = torch.randint(0, 12, (9,))
    lm_loss(x, head, targets).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(x @ head.T, targets), head)
    torch.testing.assert_close(head.grad, expected)


class CountProducts(TorchDispatchMode):
    """How many matrix products run."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "mm" in str(function)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_evaluation_makes_no_gradients():
    x, head = torch.randn(9, 6, requires_grad=True), torch.randn(12, 6, requires_grad=True)
    with CountProducts() as products:
        lm_loss(x, head, torch.randint(0, 12, (9,)))
    assert products.count == 1


class LiveLogits(TorchDispatchMode):
    """The most elements of tensors with `width` columns that are alive at one time."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.alive, self.peak = width, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == self.width:
            self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(out)]
            storages = {
                t.untyped_storage().data_ptr(): t.numel() for r in self.alive if (t := r()) is not None
            }
            self.peak = max(self.peak, sum(storages.values()))
        return out


def test_chunked_loss_never_holds_many_logits(monkeypatch):
    monkeypatch.setattr(model_file, "CHUNK_LOGITS", 101 * 16)
    peaks = {}
    for n_rows in (16, 50, 400):
        x = torch.randn(n_rows, 12, requires_grad=True)
        head = torch.randn(101, 12, requires_grad=True)
        with LiveLogits(101) as live:
            lm_loss(x, head, torch.randint(0, 101, (n_rows,))).backward()
        peaks[n_rows] = live.peak
    assert 101 * 16 <= peaks[16] <= 4 * 101 * 16
    # One chunk's logits live on while the next one's are made; no more, however many rows there are.
    assert peaks[400] == peaks[50] <= 5 * 101 * 16


def test_a_model_with_a_chunked_loss_learns_the_same(monkeypatch):
    draw = random.Random(6)
    config = random_config(draw, vocab_size=29)
    model = random_model(config, 6)
    ids, targets = random_batch(config, draw, n_seq=3, length=13)
    gradients = []
    for chunk_logits in (2**25, 29 * 5):
        monkeypatch.setattr(model_file, "CHUNK_LOGITS", chunk_logits)
        model.zero_grad()
        model(ids, targets)[0].backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- bfloat16 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("routed", ["none", "expert", "token"])
def test_bfloat16_autocast_is_close_and_routes_in_float32(routed):
    draw = random.Random(11)
    config = random_config(
        draw, routed=routed, n_recursion=3, n_layer=8, vocab_size=50, n_head=4, n_kv_head=2, n_embd=64,
        n_ffn=96, router_type="mlp", sampling="aux_router", capacity=(), alpha=0.1, rope_theta=10000.0,
    )  # fmt: skip
    model = random_model(config, 0)
    ids = torch.randint(0, 50, (4, 16))
    targets = torch.randint(0, 50, (4, 16))
    dtypes = []
    for name, module in model.named_modules():
        if "router" in name and isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, i, o: dtypes.append((i[0].dtype, o.dtype)))
    results = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, figures = model(ids, targets)
        loss.backward()
        results.append((loss, figures, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, figures, grad), (half_loss, half_figures, half_grad) = results
    assert half_loss.dtype == torch.float32
    assert half_loss != loss  # bfloat16 did take part
    assert half_loss.item() == pytest.approx(loss.item(), rel=0.01)
    assert figures["active"].tolist() == pytest.approx(half_figures["active"].tolist(), abs=0.1)
    assert half_grad.isfinite().all()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert F.cosine_similarity(grad, half_grad, 0) > 0.99
    assert half_grad.norm().item() == pytest.approx(grad.norm().item(), rel=0.05)
    assert set(dtypes) == ({(torch.float32, torch.float32)} if routed != "none" else set())


# ---- activation checkpointing --------------------------------------------------------------------


def gradients(model: MoR, run, recompute: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a fixed batch and its gradients, and how often a layer was computed."""
    model.recompute = recompute
    draw = torch.Generator().manual_seed(5)
    ids, targets = (torch.randint(0, 37, (3, 16), generator=draw) for _ in range(2))
    model.zero_grad()
    loss, _ = run(ids, targets)
    loss.backward()
    return loss, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("routing, kv_mode, attention", [
    *((routed, kv_mode, "plain") for sharing, routed, kv_mode in CELLS if sharing == "middle_cycle"),
    ("expert", "shared", "triton"), ("token", "recursion", "triton"),
])  # fmt: skip
def test_layers_computed_again_give_the_same_gradients(routing, kv_mode, attention):
    model = random_model(
        ModelConfig(vocab_size=37, block_size=16, n_layer=8, n_head=2, n_kv_head=1, n_embd=32,
                    n_ffn=24, routing=routing, kv_mode=kv_mode), 0)  # fmt: skip
    model.attention = attention
    kept, calls = gradients(model, model, False), []
    model.model["layers"][1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(model, model, True)
    assert len(calls) == 2 * sum(plan == 1 for plan in model.config.plan)
    torch.testing.assert_close(again, kept, rtol=0, atol=0)


def test_layers_computed_again_can_be_compiled():
    torch._dynamo.reset()
    model = random_model(
        ModelConfig(vocab_size=37, block_size=16, n_layer=5, n_head=2, n_kv_head=1, n_embd=16,
                    n_ffn=24, kv_mode="shared"), 0)  # fmt: skip
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(
        gradients(model, compiled, True), gradients(model, model, False), rtol=1e-4, atol=1e-5
    )


# ---- torch.compile -------------------------------------------------------------------------------

COMPILED = {
    "vanilla": dict(sharing="none", n_recursion=1, routing="none"),
    "recursive": dict(routing="none"),
    "recursive_shared": dict(routing="none", kv_mode="shared"),
    "expert": dict(),
    "expert_shared": dict(kv_mode="shared"),
    "expert_shared_update": dict(kv_mode="shared_update"),
    "expert_aux_router": dict(sampling="aux_router", router_type="mlp", router_func="tanh", z_coeff=0.1),
}


def compare_compiled(kind: str, backend: str, fullgraph=True) -> None:
    torch._dynamo.reset()
    config = ModelConfig(
        vocab_size=37, block_size=16, n_layer=5, n_head=2, n_kv_head=1, n_embd=16, n_ffn=24,
        **COMPILED[kind],
    )  # fmt: skip
    model = random_model(config, 0)
    ids, targets = torch.randint(0, 37, (3, 16)), torch.randint(0, 37, (3, 16))
    results = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=fullgraph)):
        model.zero_grad()
        loss, figures = run(ids, targets)
        loss.backward()
        results.append((loss, figures, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_training_step_is_the_same(kind):
    compare_compiled(kind, "aot_eager" if kind == "expert_shared_update" else "eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["expert", "expert_shared_update"])
def test_inductor_training_step_is_the_same(kind):
    compare_compiled(kind, "inductor")
