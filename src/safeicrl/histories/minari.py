"""Learning histories as a Minari dataset, for other libraries to read."""

import importlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from safeicrl.envs.gym import GymEnv, gym_spec
from safeicrl.errors import UserError, check_integer
from safeicrl.histories.store import TERMINATED, TRUNCATED, Histories


def export_minari(histories: Histories, dataset_id: str, *, every: int = 1, author: str | None = None) -> Any:
    """Write a Minari dataset of every `every`-th whole episode; returns it. Needs `pip install 'safeicrl[minari]'`.

    Costs are in `infos["cost"]`, beside `limit`, `task` and `history`; the first entry of each, at the reset, is
    that of the whole episode with a cost of 0. The observation after a terminated episode is not kept in
    histories, so the last one seen stands in its place; its value is zero by definition.

    `dataset.recover_environment()` makes the environment again, if Gymnasium knows it by a name.
    """
    check_integer("every", every, 1)
    try:
        minari = importlib.import_module("minari")
        importlib.import_module("h5py")
    except ImportError:
        raise UserError("minari is not installed: pip install 'safeicrl[minari]'") from None
    face = GymEnv(histories.env)
    types = face.observation_space.dtype, face.action_space.dtype
    buffers = [
        minari.data_collector.EpisodeBuffer(id=index, **episode)
        for index, episode in enumerate(itertools.islice(_episodes(histories, *types), 0, None, every))
    ]
    spec = gym_spec(histories.env)
    try:
        with warnings.catch_warnings():
            # it asks for an e-mail address, a link and the like, which are the user's to give or not
            warnings.filterwarnings("ignore", ".* is set to None|env_spec is None", UserWarning)
            return minari.create_dataset_from_buffers(
                dataset_id=dataset_id,
                buffer=buffers,
                env=spec,
                eval_env=spec,
                observation_space=face.observation_space,
                action_space=face.action_space,
                algorithm_name=str(histories.meta.get("algo", {}).get("name")),
                author=author,
                description=f"Learning histories of {histories.meta['env']['name']}, collected with safeicrl.",
                data_format="hdf5",
            )
    except (ValueError, OSError) as error:
        raise UserError(f"minari refused {dataset_id!r}: {str(error).splitlines()[0]}") from None


def _episodes(histories: Histories, seen_type: Any, action_type: Any) -> Iterator[dict[str, Any]]:
    """Every whole episode as the fields of a Minari buffer, in the types of the Gymnasium spaces."""
    for history in range(len(histories.limit)):
        truncated = 0
        for begin, end in zip(*_bounds(histories, history), strict=True):
            seen = histories.observation[history, begin:end]
            last = seen[-1:]
            if histories.done[history, end - 1] == TRUNCATED:
                last, truncated = histories.final[history, truncated][None], truncated + 1
            done, steps = histories.done[history, begin:end], end - begin
            cost = histories.cost[history, begin:end].astype(np.float32)
            yield {
                "observations": np.concatenate([seen, last]).astype(seen_type),
                "actions": histories.action[history, begin:end].astype(action_type),
                "rewards": histories.reward[history, begin:end].astype(np.float32),
                "terminations": done == TERMINATED,
                "truncations": done == TRUNCATED,
                "infos": {
                    "cost": np.concatenate([[np.float32(0)], cost]),
                    "limit": np.full(steps + 1, histories.limit[history], np.float32),
                    "task": np.full(steps + 1, histories.task[history]),
                    "history": np.full(steps + 1, history),
                },
            }


def _bounds(histories: Histories, history: int) -> tuple[list[int], list[int]]:
    sums = histories.episodes(history)
    return sums.starts.tolist(), sums.ends.tolist()
