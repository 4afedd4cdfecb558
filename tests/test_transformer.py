"""The transformer: acting through the cache equals learning on whole rows; trials and times stay apart."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import ROOM, ROWS, STEPS, forward, random_rows, random_weights, step_by_step

from safeicrl.envs.api import replace
from safeicrl.envs.dark_room import SafeDarkRoom
from safeicrl.errors import UserError
from safeicrl.nets import attention, small_heads, transformer
from safeicrl.nets.heads import PolicyNet
from safeicrl.nets.transformer import NetConfig, Transformer, feature_size

TINY = NetConfig(width=16, layers=2, heads=2, context=STEPS, dtype="float32")


@pytest.fixture(scope="module")
def rows():
    return random_rows()


def network(**changes) -> Transformer:
    # attention sharp enough that every token it sees matters
    return random_weights(Transformer, dataclasses.replace(TINY, **changes), ROOM.spec, scale=1.5)


def test_the_rows_are_staggered(rows):
    """What the tests below rest on: restarts at different times, several trials a row, all of its length used."""
    restarts = np.asarray(rows.token.first & rows.valid)
    assert len({tuple(row) for row in restarts}) > 10
    assert restarts.sum(1).min() >= 2
    assert np.asarray(rows.valid)[:, -1].any()


def test_step_equals_forward_at_staggered_timesteps(rows):
    net = network()
    whole, stepped = forward(net, rows.token, rows.trial), step_by_step(net, rows.token)
    assert np.asarray(whole).std() > 0.1
    np.testing.assert_allclose(stepped[rows.valid], whole[rows.valid], rtol=1e-4, atol=1e-4)


def test_rows_padded_for_a_gpu_have_the_same_features_and_gradients(rows, monkeypatch):
    def loss(net):
        features = net.forward(rows.token, rows.trial)
        return (features * jnp.arange(features.shape[1])[:, None]).mean(), features

    found = []
    for tile in (1, 2 * STEPS + 3):
        monkeypatch.setattr(transformer, "padding", lambda steps, tile=tile: -steps % tile)
        found.append(eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(network()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *found)


def test_rows_are_padded_on_a_gpu_only(monkeypatch):
    assert transformer.padding(1500) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (transformer.padding(1500), transformer.padding(1536)) == (36, 0)


def test_step_equals_forward_in_bfloat16(rows):
    net = network(dtype="bfloat16")
    whole, stepped = forward(net, rows.token, rows.trial), step_by_step(net, rows.token)
    assert whole.dtype == stepped.dtype == jnp.bfloat16
    exact = forward(network(), rows.token, rows.trial)[rows.valid]
    apart = np.abs(np.asarray(stepped - whole, np.float32)[rows.valid])
    assert apart.mean() < 0.02
    assert np.abs(np.asarray(whole, np.float32)[rows.valid] - exact).mean() < 0.05


def test_a_cache_that_grows_in_segments_changes_nothing(rows):
    net = network()
    grown, whole = step_by_step(net, rows.token, (7, 20)), step_by_step(net, rows.token)
    np.testing.assert_allclose(grown, whole, rtol=1e-5, atol=1e-5)


def windowed(q, k, v, trial, window: int):
    """Attention written out: every query sees its own trial's last `window` tokens, in every layer."""
    time = np.arange(q.shape[1])
    age = time[:, None] - time[None, :]
    seen = (trial[:, :, None] == trial[:, None, :]) & ((age >= 0) & (age < window))[None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * seen[:, None]
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("cuts", [(), (4,)], ids=["at once", "grown just before the ring closes"])
def test_a_short_context_is_a_sliding_window_in_every_layer(rows, monkeypatch, cuts):
    """A ring of 5 slots, trials of up to 14 tokens: old tokens are overwritten, restarts happen in mid-ring."""
    net = network(context=5)
    stepped, learned = step_by_step(net, rows.token, cuts), forward(net, rows.token, rows.trial)
    monkeypatch.setattr(transformer, "attend", windowed)
    reference = eqx.filter_jit(net.forward)(rows.token, rows.trial)
    for found in (stepped, learned):  # acting with a ring, and learning on whole rows
        np.testing.assert_allclose(found[rows.valid], reference[rows.valid], rtol=1e-4, atol=1e-4)
    assert np.abs(learned - forward(network(), rows.token, rows.trial))[rows.valid].max() > 0.1


def test_blocks_of_queries_read_the_keys_of_their_window():
    """Longer than a block of queries: the first keys that a block reads are not the row's first."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 150, 2, 4)).astype(np.float32) for _ in range(3))
    trial = (np.arange(150) > 70).astype(np.int32)[None].repeat(2, 0)
    attend = jax.jit(attention.attend, static_argnums=4)
    for window in (1, 30, 100, 400):
        expected = attention_by_hand(q, k, v, trial, window)
        np.testing.assert_allclose(attend(q, k, v, trial, window), expected, rtol=1e-4, atol=1e-5)


def test_one_layer_forgets_all_but_the_window(rows):
    """With one layer a step equals a forward pass over the last five tokens alone.

    Only with one: deeper layers read keys that were made when tokens outside the window could still be seen.
    """
    net = network(context=5, layers=1)
    long = np.asarray(rows.trial == 0).sum(1) >= 10  # rows still in their first trial after ten tokens
    assert long.any()
    token, trial = jax.tree.map(lambda x: x[long, :10], (rows.token, rows.trial))
    window = jax.tree.map(lambda x: x[:, -5:], (token, trial))
    np.testing.assert_allclose(step_by_step(net, token)[:, -1], forward(net, *window)[:, -1], rtol=1e-4, atol=1e-4)


def scrambled(rows, where):
    """The same rows with other numbers in the tokens at `where`; trial boundaries stay."""
    mix = lambda x: jnp.where(where, x[::-1] + 1, x)  # noqa: E731
    token = replace(rows.token, reward=mix(rows.token.reward), cost=mix(rows.token.cost), ctg=mix(rows.token.ctg))
    return replace(rows, token=token)


@pytest.mark.parametrize("way", ["forward", "step"])
def test_trials_of_one_row_never_see_each_other(rows, way):
    net = network()
    read = (
        (lambda r: forward(net, r.token, r.trial)) if way == "forward" else (lambda r: step_by_step(net, r.token))
    )
    before, after = read(rows), read(scrambled(rows, rows.trial == 0))
    np.testing.assert_array_equal(before[rows.trial > 0], after[rows.trial > 0])
    assert (np.abs(before - after).max(-1) > 1e-3)[np.asarray(rows.trial == 0)].all()


def test_nothing_looks_ahead(rows):
    net, now = network(), 17
    other = scrambled(rows, jnp.arange(STEPS) >= now)
    before, after = (forward(net, r.token, r.trial) for r in (rows, other))
    np.testing.assert_array_equal(before[:, :now], after[:, :now])
    assert (np.abs(before - after).max(-1) > 1e-3)[:, now:].all()


def test_everything_in_a_token_is_read(rows):
    """Each field of the last token moves its features, all else being equal."""
    net = network()
    token = jax.tree.map(lambda x: x[:, 5:6], rows.token)
    trial = rows.trial[:, 5:6]
    before = forward(net, token, trial)
    for field in dataclasses.fields(token):
        value = getattr(token, field.name)
        other = ~value if value.dtype == bool else (value + 1) % 4 if value.ndim == 3 else value + 1
        moved = np.abs(forward(net, replace(token, **{field.name: other}), trial) - before).max(-1)
        assert (moved > 1e-3).all(), field.name


def test_one_compilation_per_shape(rows):
    net, traces = network(), []

    @eqx.filter_jit
    def step(cache, token):
        traces.append(cache.keys[0].shape)
        return net.step(cache, token, token.first)

    cache = net.extend_cache(net.init_cache(ROWS, 0), 4)
    for time in range(8):
        if time == 4:
            cache = net.extend_cache(cache, 8)
        cache, _ = step(cache, jax.tree.map(lambda x: x[:, time], rows.token))  # noqa: B023
    assert [shape[-1] for shape in traces] == [4, 8]
    assert int(cache.clock) == 8


# -- attention itself


def random_qkv(steps: int, dtype=jnp.float32, dim: int = 8):
    """Queries, keys, values for two rows and three heads; trials of random lengths, eight in the first row."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(2 * rng.normal(size=(2, steps, 3, dim)), dtype) for _ in range(3))
    cuts = np.sort(rng.choice(np.arange(1, steps), size=7, replace=False))
    trial = np.stack([np.searchsorted(cuts, np.arange(steps), side="right"), np.arange(steps) >= steps // 3])
    return q, k, v, jnp.asarray(trial, jnp.int32)


def attention_by_hand(q, k, v, trial, window: int = 1000):
    q, k, v, trial = (np.asarray(x, np.float64) for x in (q, k, v, trial))
    out = np.zeros_like(v)
    for row, t, head in np.ndindex(*q.shape[:3]):
        past = [s for s in range(max(t + 1 - window, 0), t + 1) if trial[row, s] == trial[row, t]]
        scores = k[row, past, head] @ q[row, t, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[row, t, head] = weights @ v[row, past, head] / weights.sum()
    return out


@pytest.mark.parametrize("steps", [9, 64, 150])  # less than a block, exactly one, two and a bit
def test_block_causal_attention_by_hand(steps):
    q, k, v, trial = random_qkv(steps)
    np.testing.assert_allclose(
        jax.jit(attention.attend, static_argnums=4)(q, k, v, trial, q.shape[1]),
        attention_by_hand(q, k, v, trial),
        atol=1e-5,
    )


def test_long_rows_have_at_most_a_dozen_blocks(monkeypatch):
    """The number of blocks is bounded by growing them; the result stays."""
    monkeypatch.setattr(attention, "CHUNK", 4)
    q, k, v, trial = random_qkv(100)
    program = jax.jit(attention._attend_blocks, static_argnums=4).lower(q, k, v, trial, q.shape[1])
    assert program.as_text().count("stablehlo.dot_general") == 2 * 12
    found = program.compile()(q, k, v, trial)
    np.testing.assert_allclose(found, attention_by_hand(q, k, v, trial), atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "dim", "tolerance"), [("float32", 8, 1e-4), ("float32", 6, 1e-4), ("bfloat16", 8, 0.05)]
)
@pytest.mark.parametrize("window", [80, 20])
def test_the_fused_kernels_trial_code_is_as_good_as_a_mask(monkeypatch, dtype, dim, tolerance, window):
    """cuDNN runs on GPUs only; the same call computed by XLA shows that the one-hot code keeps trials apart."""
    real = jax.nn.dot_product_attention

    def on_any_machine(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        assert all(x.shape[-1] % 8 == 0 for x in args), "cuDNN refuses other head dimensions"
        return real(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_any_machine)
    q, k, v, trial = random_qkv(80, jnp.dtype(dtype), dim)
    fused = jax.jit(attention._attend_fused, static_argnums=4)(q, k, v, trial, window)
    assert fused.shape == v.shape
    np.testing.assert_allclose(
        np.asarray(fused, np.float32), attention_by_hand(q, k, v, trial, window), rtol=tolerance, atol=tolerance
    )


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(attend, q, k, v, trial, window):
    """Output and gradients in float32, of the seeds in front at once. The window is traced: one program for all."""
    out, back = jax.vjp(jax.vmap(lambda *x: attend(*x, trial, window)), q, k, v)
    return [x.astype(jnp.float32) for x in (out, *back(k))]


@pytest.mark.parametrize(
    ("dtype", "dim", "steps", "backward", "tolerance"),
    [("float32", 3, 75, 16, 3e-6), ("float32", 16, 20, 4, 3e-6), ("bfloat16", 8, 40, 16, 0.015)],
    ids=["numbers in the padding", "no room there, rows shorter than a block", "bfloat16"],
)
def test_kernels_for_small_heads_equal_plain_attention(dtype, dim, steps, backward, tolerance):
    """Output and gradients, of two seeds at once, with several trials in a row, with a window and without.

    The kernels run on GPUs; here they are interpreted. Trials and windows begin and end inside of blocks.
    """
    blocks = small_heads.Blocks(forward=32, backward=backward)
    q, k, v, trial = random_qkv(steps, jnp.dtype(dtype), dim)
    q, k, v = (jnp.stack([x, 1 - x]) for x in (q, k, v))  # [seed, row, time, head, dim]
    kernels = functools.partial(with_gradients, functools.partial(small_heads.attend, blocks=blocks))
    plain = functools.partial(with_gradients, windowed)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    # Eight and two trials per row; then one trial per row, which has blocks without a mask.
    for trials, window in ((trial, steps // 4), (0 * trial, steps), (0 * trial, steps // 2)):
        for found, right in zip(kernels(q, k, v, trials, window), plain(*exact, trials, window), strict=True):
            assert np.abs(found - right).max() < tolerance * np.abs(right).max()


def test_a_number_in_the_padding_is_as_exact_as_float32():
    number = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)  # [row, head, time]
    wide = jax.jit(small_heads._with_parts)(jnp.ones((2, 5, 3, 8), jnp.bfloat16), number)
    assert wide.dtype == jnp.bfloat16
    assert wide.shape == (2, 5, 3, 16)
    parts = np.asarray(wide, np.float64)[..., 8:]
    np.testing.assert_allclose(parts.sum(-1), number.swapaxes(1, 2), rtol=2**-23)


def test_which_attention_a_gpu_uses(monkeypatch):
    """Our kernels for small heads on one device, cuDNN for large ones and on several."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(small_heads, "attend", lambda *args: "small")
    monkeypatch.setattr(attention, "_attend_fused", lambda *args: "fused")
    monkeypatch.setattr(attention, "_attend_blocks", lambda *args: "blocks")
    heads = {dim: jnp.zeros((2, 4, 1, dim), jnp.bfloat16) for dim in (8, 16, 24)}
    used = lambda x: attention.attend(x, x, x, None, 4)  # noqa: E731
    assert [used(x) for x in heads.values()] == ["small", "small", "fused"]
    assert used(heads[8].astype(jnp.float32)) == "blocks"
    monkeypatch.setattr(attention, "divided", lambda: True)
    assert used(heads[8]) == "fused"


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="backward must divide forward, got 32 and 16"):
        small_heads.Blocks(forward=16, backward=32)


@pytest.mark.parametrize("dim", [8, 16])
def test_kernels_for_small_heads_can_be_compiled_for_a_gpu(monkeypatch, dim):
    """As far as that is possible without one: Triton knows every operation."""
    monkeypatch.setattr(small_heads, "_interpreted", lambda: False)
    q, k, v, trial = random_qkv(75, jnp.bfloat16, dim)
    total = lambda *x: jnp.sum(small_heads.attend(*x, trial, 75).astype(jnp.float32))  # noqa: E731
    program = jax.jit(jax.grad(total, (0, 1, 2))).trace(q, k, v).lower(lowering_platforms=("cuda",))
    assert program.as_text().count("xla.gpu.triton") == 3


# -- sizes


def test_parameters_at_the_papers_sizes():
    spec = SafeDarkRoom().spec
    features = 2 * (9 + 9) + 5 + 6 + 6 + 5  # two cells, action, CTG ramps, time waves, five numbers
    assert feature_size(spec) == features
    linear = lambda n_in, n_out: n_in * n_out + n_out  # noqa: E731
    encoder = linear(features, 128) + linear(128, 64) + 2 * 64
    block = 2 * 64 + 3 * 64 * 64 + linear(64, 64) + 2 * 64 + linear(64, 256) + linear(256, 64)
    actor = linear(64, 64) + linear(64, 5)
    shapes = eqx.filter_eval_shape(PolicyNet, NetConfig(), spec, jax.random.key(0))
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes) if hasattr(x, "shape"))
    assert count == encoder + 4 * block + 2 * 64 + actor == 219_717


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 0}, "width must be an integer ≥ 1, got 0"),
        ({"layers": 1.5}, "layers must be an integer ≥ 1, got 1.5"),
        ({"heads": True}, "heads must be an integer ≥ 1, got True"),
        ({"context": -3}, "context must be an integer ≥ 1, got -3"),
        ({"width": 64, "heads": 6}, "width must be a multiple of heads, got width 64 and heads 6"),
        ({"dtype": "float16"}, "dtype must be auto, float32 or bfloat16, got 'float16'"),
    ],
)
def test_impossible_networks(change, words):
    with pytest.raises(UserError) as error:
        NetConfig(**change)
    assert str(error.value) == words
