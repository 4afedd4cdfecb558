"""A small world for the tests of the page: a 5×5 room, three short episodes, a tiny network with a guard."""

from networks import random_weights

from safeicrl.agents.in_context import InContextAgent
from safeicrl.agents.reference import PlannerAgent
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig
from safeicrl.show.play.scenes import scene_of
from safeicrl.show.play.worlds import Actor, World

ROOM = SafeDarkRoom(size=5, obstacles=4, max_steps=6, episodes=3, train_budget=(0.0, 4.0), test_budget=(0.0, 4.0))


def tiny_net() -> InContextAgent:
    """Greedy; its context is shorter than a trial, so its ring of keys and values closes."""
    config = NetConfig(width=8, layers=1, heads=1, context=7, guard=1, dtype="float32")
    net = random_weights(PolicyNet, config, ROOM.spec, scale=3.0)
    return InContextAgent(net=net, risk=0.3, temperature=0.0)


def small_worlds() -> dict[str, World]:
    """The room, with the tiny network and with the planner."""
    agents = {
        "net": Actor(summary="a tiny network", make=tiny_net, guard=True),
        "planner": Actor(summary="sees the room", make=lambda: PlannerAgent(env=ROOM)),
    }
    return {"room": World(title="Room", env=ROOM, scene=scene_of(ROOM), agents=agents)}
