"""A policy as an ONNX graph, to act without JAX: one step, with the KV cache as inputs and outputs.

    inputs    observation, previous, action, reward, cost, ctg, start, time, episode     the token (tokens.py)
              noise                  of the choice; zeros take the most probable action
              risk                   what the guard tolerates, if there is one; may be left out
              keys_0, values_0, …, clock, age                                            the cache (transformer.py)
              entries                                                                    the guard's ledger, if any
              marked_clock, marked_age, best, worst, earned, left                        the memory (settled.py)
              budget                                                                     of a reserve (reserved.py)
    outputs   chosen                 the action; with a guard, also risk_taken and stepped_in
              new_keys_0, …          cache and memory after the step

All arrays have a leading axis of rows, except risk. The graph is written out by hand, in the order of
`told`, `featurise`, `take_back`, `Transformer.step`, `PolicyNet.distribution` and `Guard.judge`, whose numbers it
gives (tests/test_onnx.py). The metadata `safeicrl` says in JSON what a runner needs; examples/onnx_runner.py is
one.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.settled import NEVER
from safeicrl.budgets import ROUNDING, reserve_parts
from safeicrl.envs.api import refuse_several
from safeicrl.envs.spaces import Box, Discrete, Grid
from safeicrl.errors import UserError
from safeicrl.files import atomic_write
from safeicrl.nets import guard as guards
from safeicrl.nets.heads import EDGE, FORBIDDEN, LOG_STD
from safeicrl.nets.layers import MLP, LayerNorm, Linear
from safeicrl.nets.ledger import CELL, NEARLY_NOTHING, Ledger
from safeicrl.nets.transformer import CTG_SCALES, TIME_WAVES, Block
from safeicrl.policies.policy import Policy

OPSET = 20  # the first with Gelu
IR = 9  # the first that goes with it
NEVER_LAST = 2**62  # an episode that no trial reaches
COUNTS, NUMBERS = ("clock", "age", "marked_clock", "marked_age"), ("best", "worst", "earned", "left")
# what a trial begins with in every row: the cache's clock and age, and the memory of `settled.Settled`
MEMORY = dict.fromkeys(COUNTS, 0) | {"best": -NEVER, "worst": NEVER, "earned": 0.0, "left": 0.0}
RESERVED = {"budget": 0.0}  # with a reserve also that of `reserved.Reserved`


def export_onnx(policy: Policy, out: str | Path) -> Path:
    """Write `policy`, acting at its temperature and risk, as OUT.onnx; needs `pip install 'safeicrl[onnx]'`."""
    try:
        onnx = importlib.import_module("onnx")
    except ImportError:
        raise UserError("onnx is not installed: pip install 'safeicrl[onnx]'") from None
    agent = policy.agent
    if not isinstance(agent, InContextAgent):
        raise UserError(f"only policies of kind 'net' become ONNX graphs, not {policy.card.get('kind')!r}")
    if agent.net.guard is not None and agent.risk is not None and not isinstance(policy.env.spec.action, Discrete):
        raise UserError("the guard of real-valued actions has no ONNX graph: load the policy with guard=False")
    refuse_several(policy.env.spec, "an ONNX graph")
    slots = policy.context
    assert slots is not None
    graph = _Step(onnx, agent, slots)
    meta = _runner_needs(policy, agent, slots)
    model = onnx.helper.make_model(
        graph.build(), opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="safeicrl"
    )
    onnx.helper.set_model_props(model, {"safeicrl": json.dumps(meta)})
    onnx.checker.check_model(model)
    path = Path(out).with_suffix(".onnx")
    atomic_write(path, [model.SerializeToString()])
    return path


def _runner_needs(policy: Policy, agent: InContextAgent, slots: int) -> dict[str, Any]:
    spec, config = policy.env.spec, agent.net.trunk.config
    action = spec.action
    if isinstance(action, Discrete):
        noise: tuple[str, list[int]] = ("gumbel", [action.n])
    elif config.levels:
        noise = ("gumbel", [action.size, config.levels])
    else:
        noise = ("normal", [action.size])
    return {
        "name": policy.card.get("name"),
        "env": policy.card["env"],
        "observation": {"shape": list(spec.observation.shape), "integer": isinstance(spec.observation, Grid)},
        "action": {"shape": list(action.shape), "integer": isinstance(action, Discrete)},
        "noise": {"kind": noise[0], "shape": noise[1]},
        "greedy": agent.temperature == 0,
        "cost_unit": spec.cost_unit,
        "memory": MEMORY | (RESERVED if agent.reserve else {}),
        "layers": config.layers,
        "entries": None if (ledger := _ledger(agent)) is None else [ledger.columns, slots],
        "cache": [config.heads, config.width // config.heads, slots],
        "limits": policy.card.get("limits", []),
    }


def _ledger(agent: InContextAgent) -> Ledger | None:
    """The ledger that is read: by the policy, or by a guard that is on."""
    return agent.net.ledger if agent.risk is not None or agent.net.trunk.config.shared_ledger else None


class _Step:
    """Builds the graph, node by node; every method returns the name of what it computes."""

    def __init__(self, onnx: Any, agent: InContextAgent, slots: int) -> None:
        self.onnx, self.agent, self.slots = onnx, agent, slots
        self.net, self.spec, self.config = agent.net, agent.net.trunk.spec, agent.net.trunk.config
        self.ledger = _ledger(agent)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def build(self) -> Any:
        """The whole step."""
        token = self.token()
        x = self.embed({**token, "ctg": self.told(token)})
        first = self.op("And", token["start"], self.op("Equal", token["episode"], self.const(np.int64(0))))
        clock, age = self.take_back(token, first)
        forgot = self.op("Where", first, self.const(np.int64(0)), age)
        now = self.op("Min", self.op("Add", forgot, self.const(np.int64(1))), self.const(np.int64(self.slots)))
        slot = self.op(
            "Unsqueeze", self.op("Mod", clock, self.const(np.int64(self.slots))), self.const(np.arange(1, 4))
        )
        column = lambda x: self.op("Unsqueeze", x, self.const(np.array([1])))  # noqa: E731
        passed = self.op("Sub", column(clock), self.const(np.arange(self.slots)))  # [row, slot] tokens ago
        seen = self.op("Less", self.op("Mod", passed, self.const(np.int64(self.slots))), column(now))
        for layer, block in enumerate(self.net.trunk.blocks):
            x = self.block(layer, block, x, slot, self.op("Unsqueeze", seen, self.const(np.array([1, 2]))))
        features = self.norm(self.net.trunk.norm_out, x)
        watched = features
        if self.ledger is not None:
            watched = self.op("Concat", features, self.look_up(token, slot, seen), axis=1)
        self.output("new_clock", self.op("Add", clock, self.const(np.int64(1))), np.int64, ["row"])
        self.output("new_age", now, np.int64, ["row"])
        self.choose(self.net.seen(features, watched), watched, token)
        return self.onnx.helper.make_graph(self.nodes, "act", self.inputs, self.outputs, self.weights)

    def told(self, token: dict[str, str]) -> str:
        """`told`: what the network reads as the rest of the budget."""
        left, reserve = token["ctg"], self.agent.reserve
        if not reserve:
            return left
        held = self.op("Where", token["start"], left, self.input("budget", np.float32, ["row"]))
        self.output("new_budget", held, np.float32, ["row"])
        amount, below, others = map(np.float32, reserve_parts(reserve))
        later = self.op("Where", self.op("Less", left, held), self.const(others), self.const(np.float32(0)))
        small = self.op("Less", held, self.const(below))
        return self.op("Sub", left, self.op("Where", small, self.const(amount), later))

    def take_back(self, token: dict[str, str], first: str) -> tuple[str, str]:
        """`take_back`: the clock and the age that the step begins with."""
        op, const = self.op, self.const
        clock, age, marked_clock, marked_age = (self.input(name, np.int64, ["row"]) for name in COUNTS)
        best, worst, earned, left = (self.input(name, np.float32, ["row"]) for name in NUMBERS)
        start, episode, no = token["start"], token["episode"], const(np.float32(0))
        never = const(np.float32(NEVER)), const(np.float32(-NEVER))
        total = op("Clip", op("Add", earned, token["reward"]), never[1], never[0])
        within = op("GreaterOrEqual", op("Sub", left, token["cost"]), const(np.float32(-1e-6)))  # as `is_over`
        spread = op("Where", op("Greater", best, never[1]), op("Sub", best, worst), no)
        better = op("Greater", total, op("Add", best, spread))
        known = self.agent.last if self.agent.settles else None
        last = const(np.int64(NEVER_LAST if known is None else known))
        ended = op("And", start, op("Not", first))
        late = op("And", ended, op("Greater", episode, last))
        back = op("And", late, op("And", within, op("Not", better)))
        kept = op("Min", marked_age, const(np.int64(max(self.slots - self.spec.max_steps, 0))))
        clock, age = op("Where", back, marked_clock, clock), op("Where", back, kept, age)
        begins = op("And", op("And", start, op("GreaterOrEqual", episode, last)), op("Not", back))
        for name, new, old in (("marked_clock", clock, marked_clock), ("marked_age", age, marked_age)):
            self.output(f"new_{name}", op("Where", begins, new, old), np.int64, ["row"])
        best = op("Where", op("And", ended, within), op("Max", best, total), best)
        worst = op("Where", ended, op("Min", worst, total), worst)
        for name, value in (
            ("best", op("Where", first, never[1], best)),
            ("worst", op("Where", first, never[0], worst)),
            ("earned", op("Where", start, no, total)),
            ("left", token["ctg"]),
        ):
            self.output(f"new_{name}", value, np.float32, ["row"])
        return clock, age

    # -- the token ------------------------------------------------------------------------------------------

    def token(self) -> dict[str, str]:
        """The inputs that make a token."""
        seen, action = self.spec.observation, self.spec.action
        integer = np.int64 if isinstance(seen, Grid) else np.float32
        shape = ["row", *seen.shape]
        names = {name: self.input(name, integer, shape) for name in ("observation", "previous")}
        kind = np.int64 if isinstance(action, Discrete) else np.float32
        names["action"] = self.input("action", kind, ["row", *action.shape])
        for name in ("reward", "cost", "ctg"):
            names[name] = self.input(name, np.float32, ["row"])
        names["start"] = self.input("start", np.bool_, ["row"])
        for name in ("time", "episode"):
            names[name] = self.input(name, np.int64, ["row"])
        return names

    def embed(self, token: dict[str, str]) -> str:
        """`featurise` and the encoder."""
        spec, column = self.spec, lambda name: self.op("Unsqueeze", name, self.const(np.array([1])))
        episode = token["episode"]
        if self.agent.last is not None:
            episode = self.op("Min", episode, self.const(np.int64(self.agent.last)))
        first = self.op("And", token["start"], self.op("Equal", episode, self.const(np.int64(0))))
        if self.config.saturate is not None:
            episode = self.op("Min", episode, self.const(np.int64(self.config.saturate)))
        action = self.encode_action(token["action"])
        action = self.op("Where", column(first), self.const(np.float32(0)), action)
        ramps = max(spec.bounds("train")[1], 1.0) * 0.5 ** np.arange(CTG_SCALES)
        spent = self.op("Div", column(token["ctg"]), self.const(ramps.astype(np.float32)))
        spent = self.op("Clip", spent, self.const(np.float32(-1)), self.const(np.float32(1)))
        time = self.op("Div", self.real(column(token["time"])), self.const(np.float32(spec.max_steps)))
        waves = self.op("Mul", time, self.const((np.pi * 2.0 ** np.arange(TIME_WAVES)).astype(np.float32)))
        share = self.op("Div", self.real(column(episode)), self.const(np.float32(spec.episodes)))
        parts = [
            self.encode(token["observation"]), self.encode(token["previous"]), action, spent,
            self.op("Sin", waves), self.op("Cos", waves),
            column(token["reward"]), column(token["cost"]), self.real(column(token["start"])), time, share,
        ]  # fmt: skip
        features = self.op("Concat", *parts, axis=1)
        return self.norm(self.net.trunk.norm_in, self.mlp(self.net.trunk.encoder, features))

    def encode(self, observation: str) -> str:
        """What a network sees of an observation."""
        space = self.spec.observation
        if isinstance(space, Box):
            return observation
        columns = [
            self.one_hot(self.op("Gather", observation, self.const(np.int64(i)), axis=1), size)
            for i, size in enumerate(space.sizes)
        ]
        return self.op("Concat", *columns, axis=1) if len(columns) > 1 else columns[0]

    def encode_action(self, action: str) -> str:
        """What a network sees of the last action."""
        space = self.spec.action
        if isinstance(space, Discrete):
            return self.one_hot(action, space.n)
        centre, half = (self.const(np.float32(x)) for x in space.centre_and_half())
        return self.op("Div", self.op("Sub", action, centre), half)

    # -- the network ----------------------------------------------------------------------------------------

    def block(self, layer: int, block: Block, x: str, slot: str, seen: str) -> str:
        """Attention over the cache with this step's keys and values in it, then the MLP."""
        config, slots = self.config, self.slots
        heads, size = config.heads, config.width // config.heads
        keys = self.input(f"keys_{layer}", np.float32, ["row", heads, size, slots])
        values = self.input(f"values_{layer}", np.float32, ["row", heads, slots, size])
        qkv = self.linear(block.qkv, self.norm(block.norm_attention, x))
        parts = self.split(qkv, 3)
        shape = lambda *tail: self.const(np.array([-1, heads, *tail]))  # noqa: E731
        q, k, v = (
            self.op("Reshape", part, shape(*tail))
            for part, tail in zip(parts, ((1, size), (size, 1), (1, size)), strict=True)
        )
        # a copy and a few writes: onnxruntime's Where of the same takes several times as long
        put = lambda cache, new, axis, name: self.op(  # noqa: E731
            "ScatterElements", cache, self.op("Expand", slot, self.op("Shape", new)), new, axis=axis, out=name
        )
        keys = put(keys, k, 3, f"new_keys_{layer}")
        self.output(f"new_keys_{layer}", keys, np.float32, ["row", heads, size, slots])
        values = put(values, v, 2, f"new_values_{layer}")
        self.output(f"new_values_{layer}", values, np.float32, ["row", heads, slots, size])
        scores = self.op("Mul", self.op("MatMul", q, keys), self.const(np.float32(size**-0.5)))
        scores = self.op("Where", seen, scores, self.const(np.float32(-np.inf)))
        attended = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        attended = self.op("Reshape", attended, self.const(np.array([-1, config.width])))
        x = self.op("Add", x, self.linear(block.out, attended))
        return self.op("Add", x, self.mlp(block.mlp, self.norm(block.norm_mlp, x)))

    def linear(self, layer: Linear, x: str) -> str:
        """x W + b."""
        y = self.op("MatMul", x, self.const(np.asarray(layer.weight, np.float32)))
        return y if layer.bias is None else self.op("Add", y, self.const(np.asarray(layer.bias, np.float32)))

    def mlp(self, layers: MLP, x: str) -> str:
        """Linear → GELU → linear."""
        return self.linear(layers.second, self.op("Gelu", self.linear(layers.first, x), approximate="tanh"))

    def norm(self, layer: LayerNorm, x: str) -> str:
        """Layer norm of the last axis."""
        scale, offset = (self.const(np.asarray(part, np.float32)) for part in (layer.scale, layer.offset))
        return self.op("LayerNormalization", x, scale, offset, axis=-1, epsilon=1e-5)

    def look_up(self, token: dict[str, str], slot: str, seen: str) -> str:
        """`Ledger.look_up` in the entries with this step's own, [row, size]."""
        ledger, op, const = self.ledger, self.op, lambda x: self.const(np.asarray(x, np.float32))
        assert ledger is not None
        points, dims = ledger.points.shape
        wide = lambda x: op("Unsqueeze", x, self.const(np.array([1])))  # noqa: E731
        now, before = (self.seen(token[name]) for name in ("observation", "previous"))
        here = self.linear(ledger.place, now)
        paid = op("Div", wide(token["cost"]), const(self.spec.max_cost))
        entry = op("Concat", here, paid, self.real(wide(op("Not", token["start"]))), axis=1)
        entry = op("Unsqueeze", entry, self.const(np.array([2])))
        entries = self.input("entries", np.float32, ["row", ledger.columns, self.slots])
        at = op("Expand", op("Squeeze", slot, self.const(np.array([3]))), op("Shape", entry))
        entries = op("ScatterElements", entries, at, entry, axis=2, out="new_entries")
        self.output("new_entries", entries, np.float32, ["row", ledger.columns, self.slots])
        places, cost, known = (
            op("Slice", entries, self.const(np.array([a])), self.const(np.array([b])), self.const(np.array([1])))
            for a, b in ((0, dims), (dims, dims + 1), (dims + 1, dims + 2))
        )
        moved = op("Where", wide(token["start"]), const(0), op("Sub", now, before))
        steered = self.mlp(ledger.steer, op("Concat", now, moved, axis=1))
        steered = op("Reshape", steered, self.const(np.array([-1, points, dims])))
        asked = op("Add", op("Add", wide(here), const(ledger.points)), steered)  # [row, point, dim]
        square = lambda x, axis: op("ReduceSum", op("Mul", x, x), self.const(np.array([axis])), keepdims=1)  # noqa: E731
        across = lambda x: op("Transpose", x, perm=[0, 2, 1])  # noqa: E731
        width = np.exp(np.asarray(ledger.widths))[:, None]
        near = op(
            "Sub",
            op("MatMul", op("Mul", const(2 * width), asked), places),
            op("Mul", const(width), square(asked, 2)),
        )
        near = op("Exp", op("Sub", near, op("Mul", const(width), square(places, 1))))
        near = op("Where", wide(seen), near, const(0))  # [row, point, slot]
        sums = op("MatMul", near, across(op("Concat", known, op("Mul", known, cost), axis=1)))  # [row, point, 2]
        count, paid = (op("Gather", sums, self.const(np.int64(i)), axis=2) for i in (0, 1))
        share = op("Div", paid, op("Add", count, const(NEARLY_NOTHING)))
        return op("Concat", op("Log", op("Add", count, const(1))), share, axis=1)

    def seen(self, observation: str) -> str:
        """`Ledger.scaled`."""
        if not isinstance(self.spec.observation, Box):
            return self.op("Mul", self.real(observation), self.const(np.float32(CELL)))
        size = self.op("Log", self.op("Add", self.op("Abs", observation), self.const(np.float32(1))))
        return self.op("Mul", self.op("Sign", observation), size)

    # -- the choice -----------------------------------------------------------------------------------------

    def choose(self, seen: str, watched: str, token: dict[str, str]) -> None:
        """The action: the one whose score plus noise is greatest, or the Gaussian at the noise.

        `seen` is what the policy's head reads, `watched` what the guard reads.
        """
        space, levels = self.spec.action, self.config.levels
        temperature = self.agent.temperature or 1.0  # greedy is noise of zero
        out = self.mlp(self.net.actor, seen)
        if isinstance(space, Discrete):
            logits = self.op("Div", out, self.const(np.float32(temperature)))
            scores = self.op("Add", logits, self.input("noise", np.float32, ["row", space.n]))
            if self.net.guard is not None and self.agent.risk is not None:
                scores = self.guarded(watched, token["ctg"], token["time"], scores)
            self.output("chosen", self.op("ArgMax", scores, axis=1, keepdims=0), np.int64, ["row"])
        elif levels:
            logits = self.op("Reshape", out, self.const(np.array([-1, space.size, levels])))
            logits = self.op("Div", logits, self.const(np.float32(temperature)))
            scores = self.op("Add", logits, self.input("noise", np.float32, ["row", space.size, levels]))
            level = self.real(self.op("ArgMax", scores, axis=2, keepdims=0))
            step = self.const(np.float32((space.high - space.low) / (levels - 1)))
            action = self.op("Add", self.const(np.float32(space.low)), self.op("Mul", step, level))
            self.output("chosen", action, np.float32, ["row", space.size])
        else:
            self.gaussian(out, temperature, token)

    def gaussian(self, out: str, temperature: float, token: dict[str, str]) -> None:
        """`TanhNormal`, and `braked` (agents/brake.py)."""
        space, (low, high) = self.spec.action, LOG_STD
        assert isinstance(space, Box)
        mean, spread = self.split(out, 2)
        share = self.op("Sigmoid", self.op("Add", spread, self.const(np.float32(1))))
        log_std = self.op("Mul", share, self.const(np.float32(high - low)))
        log_std = self.op("Add", log_std, self.const(np.float32(low + 0.5 * np.log(temperature))))
        noise = self.input("noise", np.float32, ["row", space.size])
        raw = self.op("Add", mean, self.op("Mul", self.op("Exp", log_std), noise))
        centre, half = space.centre_and_half()
        action = self.op("Mul", self.op("Tanh", raw), self.const(np.float32(half * EDGE)))
        if self.agent.brake != 1:
            unit = self.spec.cost_unit
            bound = self.const(np.float32((1 - ROUNDING) * unit if unit else 0))
            spent = self.op("Less" if unit else "LessOrEqual", token["ctg"], bound)
            cost = self.op("Greater", token["cost"], self.const(np.float32(0)))
            brakes = self.op("And", self.op("And", cost, spent), self.op("Not", token["start"]))
            harder = self.op("Mul", action, self.const(np.float32(self.agent.brake)))
            ends = (self.const(np.float32(end - centre)) for end in (space.low, space.high))
            harder = self.op("Clip", harder, *ends)
            action = self.op("Where", self.op("Unsqueeze", brakes, self.const(np.array([1]))), harder, action)
        action = self.op("Add", action, self.const(np.float32(centre)))
        self.output("chosen", action, np.float32, ["row", space.size])

    def guarded(self, features: str, ctg: str, time: str, scores: str) -> str:
        """`Guard.judge`: the scores with those of forbidden actions out of reach; also what the guard did."""
        guard = self.net.guard
        assert guard is not None
        count, actions = guard.thresholds, guard.choices
        risk = self.input("risk", np.float32, [], default=np.float32(self.agent.risk))  # type: ignore[arg-type]
        shape = self.const(np.array([-1, guard.depth, count, actions]))
        logits = self.op("Reshape", self.mlp(guard.head, features), shape)
        logits = self.ahead(logits, time)  # [row, threshold, action]
        weights = self.op("Unsqueeze", self.edge_weights(ctg), self.const(np.array([2])))
        chance = self.op("Mul", self.op("Sigmoid", logits), weights)
        chance = self.op("ReduceSum", chance, self.const(np.array([1])), keepdims=0)  # [row, action]
        least = self.op("ReduceMin", chance, self.const(np.array([1])), keepdims=1)
        slack = self.op("Mul", least, self.const(np.float32(guards.SLACK)))
        allowed = self.op("LessOrEqual", chance, self.op("Max", risk, slack))
        safe = self.op("Where", allowed, scores, self.const(np.float32(FORBIDDEN)))
        taken = self.one_hot(self.op("ArgMax", safe, axis=1, keepdims=0), actions)
        asked = self.one_hot(self.op("ArgMax", scores, axis=1, keepdims=0), actions)
        total = lambda x, y: self.op("ReduceSum", self.op("Mul", x, y), self.const(np.array([1])), keepdims=0)  # noqa: E731
        self.output("risk_taken", total(chance, taken), np.float32, ["row"])
        fine = total(self.real(allowed), asked)
        self.output("stepped_in", self.op("Less", fine, self.const(np.float32(0.5))), np.bool_, ["row"])
        return safe

    def edge_weights(self, ctg: str) -> str:
        """`Guard._weights`: [row, threshold]."""
        guard = self.net.guard
        assert guard is not None
        left, number = self.op("Relu", ctg), lambda x: self.const(np.asarray(x, np.float32))
        if guard.unit:
            units = self.op("Add", self.op("Div", left, number(guard.unit)), number(guards.NEAR))
            left = self.op("Mul", self.op("Floor", units), number(guard.unit))
        gaps = np.diff(guard.edges, prepend=-1.0)
        away = self.op("Unsqueeze", left, self.const(np.array([1])))
        away = self.op("Sub", away, number(guard.edges[:-1]))  # [row, threshold]
        above = self.op("Div", away, number(gaps[1:]))
        below = self.op("Div", away, number(-gaps[:-1]))
        share = self.op("Sub", number(1), self.op("Max", above, below))
        return self.op("Clip", share, number(0), number(1))

    def ahead(self, logits: str, time: str) -> str:
        """`Guard._ahead`: of [row, depth, threshold, action], those of the depth that counts at this time."""
        guard = self.net.guard
        assert guard is not None
        if guard.limit is None or guard.depth == 1:
            return self.op("Gather", logits, self.const(np.int64(guard.depth - 1)), axis=1)
        full, shape = self.const(np.int64(guard.depth)), np.array([1, 1, guard.thresholds, guard.choices])
        left = self.op("Sub", self.const(np.int64(guard.limit)), time)
        inside = self.op("And", self.op("Greater", left, self.const(np.int64(0))), self.op("Less", left, full))
        at = self.op("Sub", self.op("Where", inside, left, full), self.const(np.int64(1)))
        at = self.op("Expand", self.op("Reshape", at, self.const(np.array([-1, 1, 1, 1]))), self.const(shape))
        return self.op("Squeeze", self.op("GatherElements", logits, at, axis=1), self.const(np.array([1])))

    # -- ONNX -----------------------------------------------------------------------------------------------

    def split(self, x: str, parts: int) -> list[str]:
        """Equal parts of the second axis."""
        names = [f"split_{len(self.nodes)}_{part}" for part in range(parts)]
        self.nodes.append(self.onnx.helper.make_node("Split", [x], names, axis=1, num_outputs=parts))
        return names

    def op(self, kind: str, *inputs: str, out: str | None = None, **settings: Any) -> str:
        """One operation with one result, called `out` if that is given."""
        name = out or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], **settings))
        return name

    def const(self, value: Any) -> str:
        """A number or an array of the graph itself."""
        array = np.asarray(value)
        name = f"constant_{len(self.weights)}"
        self.weights.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def input(self, name: str, kind: type, shape: list, default: Any = None) -> str:
        """An input of the graph; one with a default may be left out."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, self.kind(kind), shape))
        if default is not None:
            self.weights.append(self.onnx.numpy_helper.from_array(np.asarray(default), name))
        return name

    def output(self, name: str, value: str, kind: type, shape: list) -> None:
        """Give a value out; a large one has its name already, and needs no copy."""
        if value != name:
            self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))
        self.outputs.append(self.onnx.helper.make_tensor_value_info(name, self.kind(kind), shape))

    def kind(self, kind: type) -> int:
        """ONNX's number for a NumPy type."""
        return self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))

    def real(self, x: str) -> str:
        """As float32."""
        return self.op("Cast", x, to=self.onnx.TensorProto.FLOAT)

    def one_hot(self, index: str, size: int) -> str:
        """[row] int → [row, size] float; −1 is like the last index, and is masked by its reader."""
        return self.op(
            "OneHot", index, self.const(np.int64(size)), self.const(np.array([0, 1], np.float32)), axis=-1
        )
