"""Act with an exported policy without JAX: NumPy and onnxruntime only.

safeicrl export safe-dark-room --onnx room.onnx
policy = OnnxPolicy("room.onnx")
policy.start(budget=[3.0, 5.0])                       # two trials side by side
action = policy.act(observations)                     # [row, ...]; the next calls also take the last step
action = policy.act(observations, rewards, costs, dones)
"""

import json

import numpy as np
import onnxruntime


class OnnxPolicy:
    def __init__(self, path: str, threads: int = 1):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3  # 3: errors only
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.meta = json.loads(self.session.get_modelmeta().custom_metadata_map["safeicrl"])

    def start(self, budget, seed=0, greedy=None):
        """Forget everything; `budget` is the limit on the cost of an episode, one for each row."""
        unit, (heads, size, slots), rows = self.meta["cost_unit"], self.meta["cache"], len(budget)
        budget = np.asarray(budget, np.float32)  # costs are whole units, and so is what may be spent
        self.budget = np.floor(budget / unit + 1e-4).astype(np.float32) * np.float32(unit) if unit else budget
        self.rng, self.greedy = np.random.default_rng(seed), self.meta["greedy"] if greedy is None else greedy
        kinds = {int: np.int64, float: np.float32}
        self.cache = {name: np.full(rows, x, kinds[type(x)]) for name, x in self.meta["memory"].items()}
        for layer in range(self.meta["layers"]):
            self.cache[f"keys_{layer}"] = np.zeros((rows, heads, size, slots), np.float32)
            self.cache[f"values_{layer}"] = np.zeros((rows, heads, slots, size), np.float32)
        if self.meta.get("entries"):
            self.cache["entries"] = np.zeros((rows, *self.meta["entries"]), np.float32)
        self.token = None

    def act(self, observation, reward=0.0, cost=0.0, done=False, noise=None):
        """The next actions, [row]; after an episode has ended, `observation` is the first one of the next."""
        rows, now = len(self.budget), {}
        now["observation"] = np.asarray(observation, int if self.meta["observation"]["integer"] else np.float32)
        now |= {"reward": np.full(rows, reward, np.float32), "cost": np.full(rows, cost, np.float32)}
        if self.token is None:
            kind, zero = int if self.meta["action"]["integer"] else np.float32, np.zeros(rows, int)
            now |= {"action": np.zeros((rows, *self.meta["action"]["shape"]), kind), "time": zero, "episode": zero}
            now |= {"previous": now["observation"], "ctg": self.budget, "start": np.ones(rows, bool)}
        else:
            last, done = self.token, np.full(rows, done, bool)
            now |= {"action": self.said["chosen"], "previous": last["observation"], "start": done}
            now |= {"time": np.where(done, 0, last["time"] + 1), "episode": last["episode"] + done}
            now["ctg"] = np.where(done, self.budget, last["ctg"] - now["cost"])
        if noise is None:
            shape = (rows, *self.meta["noise"]["shape"])
            draw = self.rng.gumbel if self.meta["noise"]["kind"] == "gumbel" else self.rng.standard_normal
            noise = np.zeros(shape) if self.greedy else draw(size=shape)
        fed = {**now, **self.cache, "noise": np.asarray(noise, np.float32)}
        self.said = dict(zip(self.outputs, self.session.run(self.outputs, fed), strict=True))
        self.cache, self.token = {name: self.said[f"new_{name}"] for name in self.cache}, now
        return self.said["chosen"]
