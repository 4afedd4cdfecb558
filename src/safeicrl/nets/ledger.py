"""The guard's ledger: what the steps of the trial have cost, to be looked up near where the agent is.

A transformer can learn where costs were, but only slowly: the guard's loss is one of several on its features. A
ledger does not have to: every token is an entry, a place and what it cost to get there. A few points around the
agent are looked up among all entries of the trial:

    n(q) = Σ_j exp(−w |q − x_j|²)                  how well the point q is known
    c(q) = Σ_j exp(−w |q − x_j|²) c_j / n(q)       what it has cost there

The points q, the widths w and what of an observation makes a place x are learned with the guard.

Where observations are the cells of a small grid, the entries of a cell are merged: a look-up then goes through as
many entries as there are cells, however long the trial is. An agent that acts adds each step to what its memory
holds of the cells.
"""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp

from safeicrl.envs.api import EnvSpec, Key
from safeicrl.envs.spaces import Grid
from safeicrl.nets.layers import MLP, Linear
from safeicrl.tokens import Token

DIMS = 4  # of a place, at most
CELL = 0.25  # of a grid, in units of places
REACH = 0.4  # how far away the points are before anything is learned
WIDTHS = (2.0, 4.5)  # log of the first and of the last point's w, likewise
NEARLY_NOTHING = 1e-3  # where a point is known less than that, nothing has been paid there
BLOCK = 128  # steps that are looked up at a time in whole rows
SMALL = 1024  # cells of a grid whose entries are merged, at most


class Ledger(eqx.Module):
    """Writes tokens down and looks up costs."""

    place: Linear  # what of an observation makes a place
    steer: MLP  # where the points are, beside `points`, by how the agent has moved
    points: jax.Array  # [point, dim], relative to the agent's place
    widths: jax.Array  # [point], log w
    spec: EnvSpec = eqx.field(static=True)

    def __init__(self, spec: EnvSpec, points: int, key: Key):
        place, steer, around = jax.random.split(key, 3)
        seen = spec.observation.size
        dims = min(seen, DIMS)
        # Position comes first in what robots see, and is all there is in a grid.
        eye = jnp.eye(seen, dims)
        self.place = eqx.tree_at(lambda x: x.weight, Linear(seen, dims, place, bias=False), eye)
        self.steer = MLP(2 * seen, 32, points * dims, steer, scale=0.3)
        self.points = REACH * jax.random.normal(around, (points, dims))
        self.widths = jnp.linspace(*WIDTHS, points)
        self.spec = spec

    @property
    def size(self) -> int:
        """How many numbers a look-up gives."""
        return 2 * len(self.widths)

    @property
    def columns(self) -> int:
        """How many numbers an entry has: a place, its cost, and whether that is known."""
        return self.points.shape[-1] + 2

    @property
    def cell_count(self) -> int:
        """How many cells there are, if the entries of each are merged; else 0."""
        grid = self.spec.observation
        count = math.prod(grid.sizes) if isinstance(grid, Grid) else 0
        return count if count <= SMALL else 0

    def entry(self, token: Token) -> jax.Array:
        """Where the last step led, what it cost, and 1, or 0 where that is not known; [..., columns].

        The observation that ended an episode is not in the token that follows.
        """
        return jnp.concatenate([self._place(token.observation), self._written(token)], -1)

    def look_up(self, token: Token, entries: jax.Array, visible: jax.Array) -> jax.Array:
        """What is known of the points around the agent, [..., size]; entries [..., column, entry].

        `token` [...], `visible` [..., entry] bool: which entries it may see.
        """
        near = self._near(token, entries[..., :-2, :])
        cost, known = entries[..., -2, :], jnp.where(visible, entries[..., -1, :], 0.0)
        # Sums, not products of matrices: XLA makes one fast loop of it all, and never writes the kernel down.
        count, paid = ((near * x[..., None, :]).sum(-1) for x in (known, known * cost))
        return _found(count, paid)

    # -- an agent's memory ----------------------------------------------------------------------------------

    def empty(self, rows: int, slots: int) -> tuple[jax.Array, jax.Array | None]:
        """Nothing written yet: slots for steps, [row, column, slot], and [row, 2, cell] if cells are merged."""
        if self.cell_count:
            return jnp.zeros((rows, 3, slots)), jnp.zeros((rows, 2, self.cell_count))
        return jnp.zeros((rows, self.columns, slots)), None

    def slot(self, token: Token) -> jax.Array:
        """What is kept of a step, [..., column]: its entry; if cells are merged, (cell, cost, known)."""
        grid = self.spec.observation
        if not self.cell_count:
            return self.entry(token)
        assert isinstance(grid, Grid)
        return jnp.concatenate([grid.flat(token.observation)[..., None], self._written(token)], -1)

    def follow(
        self, cells: jax.Array, token: Token, gone: jax.Array, slots: jax.Array, visible: jax.Array, again: bool
    ) -> jax.Array:
        """The cells after one more step, [row, 2, cell], without what it overwrote, `gone` [row, 3].

        With `again` they are summed anew from the `slots` [row, 3, slot] where an episode begins: a memory may have
        been taken back to an earlier time there.
        """
        after = cells + self._added(self.slot(token)) - self._added(gone)
        if not again:
            return after
        return jax.lax.cond(
            token.start.any(),
            lambda: jnp.where(token.start[:, None, None], self._summed(slots, visible), after),
            lambda: after,
        )

    def look_up_cells(self, token: Token, cells: jax.Array) -> jax.Array:
        """The look-up among the cells [..., 2, cell]: what was paid in each, and how many entries it has."""
        grid = self.spec.observation
        assert isinstance(grid, Grid)
        near = self._near(token, self._place(jnp.asarray(grid.cells())).T)
        # Here a product of matrices is faster: the places of the cells are the same for all tokens.
        paid, count = jnp.moveaxis(jnp.einsum("...pc,...kc->...pk", near, cells), -1, 0)
        return _found(count, paid)

    def _summed(self, slots: jax.Array, visible: jax.Array) -> jax.Array:
        """The cells by all slots that are in sight, [row, 2, cell]."""
        known = jnp.where(visible, slots[:, 2], 0.0)
        both = jnp.stack([known * slots[:, 1], known], -1)  # [row, slot, 2]
        empty = jnp.zeros((self.cell_count, 2))
        add = jax.vmap(lambda cell, values: empty.at[cell].add(values))
        return jnp.moveaxis(add(slots[:, 0].astype(jnp.int32), both), -1, -2)

    # -- whole rows -----------------------------------------------------------------------------------------

    def look_up_span(
        self, token: Token, trial: jax.Array, context: int, begin: jax.Array | int, steps: int
    ) -> jax.Array:
        """`look_up` for `steps` tokens of whole rows, the first at time `begin`: [row, steps, size].

        `token` and `trial`, [row, time], are of the whole rows; a token sees the newest `context` of its trial.
        """
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, begin, steps, 1)  # noqa: E731
        age = (begin + jnp.arange(steps))[:, None] - jnp.arange(trial.shape[1])  # [steps, time]
        seen = (age >= 0) & (age < context) & (cut(trial)[..., None] == trial[:, None, :])
        return self.look_up(jax.tree.map(cut, token), jnp.moveaxis(self.entry(token), -1, -2)[:, None], seen)

    def look_up_rows(self, token: Token, trial: jax.Array, context: int) -> jax.Array:
        """`look_up` for all tokens of whole rows, [row, time, size].

        A block of steps at a time: among the cells of a grid, if these are no more than the steps of a row, else
        among the entries that one of the block's steps may see. That bounds the memory.
        """
        steps, found = trial.shape[1], []
        if 0 < self.cell_count <= steps:
            rows = token, self._in_cells(token, trial, context)
            for begin in range(0, steps, BLOCK):
                block = jax.tree.map(lambda x: x[:, begin : begin + BLOCK], rows)  # noqa: B023
                found.append(jax.checkpoint(functools.partial(self.look_up_cells))(*block))
            return jnp.concatenate(found, 1)
        for begin in range(0, steps, BLOCK):
            end, first = min(begin + BLOCK, steps), max(0, begin - context + 1)
            span = functools.partial(self.look_up_span, context=context, begin=begin - first, steps=end - begin)
            seen, among = jax.tree.map(lambda x: x[:, first:end], (token, trial))  # noqa: B023
            found.append(jax.checkpoint(span)(seen, among))
        return jnp.concatenate(found, 1)

    def scaled(self, observation: jax.Array) -> jax.Array:
        """An observation as real numbers of moderate size."""
        if jnp.issubdtype(observation.dtype, jnp.integer):
            return CELL * observation.astype(jnp.float32)
        return jnp.sign(observation) * jnp.log1p(jnp.abs(observation))

    def _written(self, token: Token) -> jax.Array:
        known = ~token.start
        return jnp.stack([token.cost / self.spec.max_cost, known.astype(jnp.float32)], -1)

    def _in_cells(self, token: Token, trial: jax.Array, context: int) -> jax.Array:
        """What each token of whole rows may see of the cells, [row, time, 2, cell]."""
        time = jnp.arange(trial.shape[1])
        so_far = jnp.cumsum(self._added(self.slot(token)), 1)
        # less what was there when the trial began, or what is too old
        began = jnp.pad(trial[:, 1:] != trial[:, :-1], ((0, 0), (1, 0)))
        began = jax.lax.cummax(jnp.where(began, time, 0), axis=1)
        before = jnp.maximum(began, time - context + 1)[..., None, None]
        return so_far - jnp.take_along_axis(jnp.pad(so_far, ((0, 0), (1, 0), (0, 0), (0, 0))), before, 1)

    def _added(self, slot: jax.Array) -> jax.Array:
        """What a slot adds to the cells, [..., 2, cell] of [..., 3]."""
        where = slot[..., 2:] * jax.nn.one_hot(slot[..., 0].astype(jnp.int32), self.cell_count)
        return jnp.stack([slot[..., 1:2] * where, where], -2)

    def _place(self, observation: jax.Array) -> jax.Array:
        return self.place(self.scaled(observation))

    def _near(self, token: Token, places: jax.Array) -> jax.Array:
        """How near the points around the agent are to the places [..., dim, place]: [..., point, place]."""
        here, before = self._place(token.observation), self.scaled(token.previous)
        moved = jnp.where(token.start[..., None], 0.0, self.scaled(token.observation) - before)
        steered = self.steer(jnp.concatenate([self.scaled(token.observation), moved], -1))
        points = here[..., None, :] + self.points + steered.reshape(*here.shape[:-1], *self.points.shape)
        # one dimension after the other: an axis of dimensions would be slow
        gaps = (points[..., dim, None] - places[..., None, dim, :] for dim in range(points.shape[-1]))
        return jnp.exp(-jnp.exp(self.widths)[:, None] * sum(gap**2 for gap in gaps))


def _found(count: jax.Array, paid: jax.Array) -> jax.Array:
    """What a look-up gives, from the sums over what is near each point."""
    return jnp.concatenate([jnp.log1p(count), paid / (count + NEARLY_NOTHING)], -1)
