"""A decoder-only Transformer train step in plain JAX, with no sharding anywhere.

This is the program that the planner is judged on first: embedding lookup, pre-norm blocks of causal
grouped-query attention with rotary positions and of a feed-forward layer, an output head, softmax
cross-entropy, gradients with one `jax.checkpoint` per block, and Adam. Parameters are f32 masters, cast to
the compute type where they are used. `scan=True` stacks the layers' weights `[L, ...]` under
`jax.lax.scan`; `scan=False` keeps a list of layers and unrolls them.

Shape letters: L layers, M model, H feed-forward, N query heads, K key-value heads, D head size, V vocabulary,
B sequences, S tokens of a sequence (T where they are attended to).

`train_step` and the factories `dense_8b`, `dense_64b`, ... return `(fn, args)`; the arguments are
`jax.ShapeDtypeStruct`s, so that nothing is allocated. The sizes live in `autoshard.zoo.dense_config`.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoshard.zoo.dense_config import (
    ACTIVATION_DIMS,
    PRESETS,
    DenseConfig,
    model_flops,
    parameter_count,
    scaled_down,
    weight_dims,
)
from autoshard.zoo.experts import routed_mlp
from autoshard.zoo.optimizers import OPTIMIZERS, Tree

__all__ = [
    "ACTIVATION_DIMS",
    "DONATE",
    "PRESETS",
    "DenseConfig",
    "causal_attention",
    "decode_step",
    "forward",
    "init",
    "model_flops",
    "parameter_count",
    "scaled_down",
    "train_step",
    "weight_dims",
]

DONATE = (0, 1)
"""Arguments of the train step whose buffers the results can reuse: parameters and optimizer state."""

Batch: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[[Tree, Tree, Batch], tuple[Tree, Tree, jax.Array]]
Name: TypeAlias = Callable[[jax.Array, str], jax.Array]
Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend from q [B, S, N, D], N heads in groups that share the K heads of k and v [B, S, K, D], backwards only."""
    batch, seq, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, seq, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=jnp.float32) * size**-0.5
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
    attention = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", attention, v).reshape(batch, seq, heads, size)


def _attention_until(q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array) -> jax.Array:
    """Attend from q [B, 1, N, D] to the cached k and v [B, T, K, D] up to and with a position."""
    batch, _, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bkgd,btkd->bkgt", q, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(jnp.arange(k.shape[1]) <= position, scores, -1e30)
    attention = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgt,btkd->bkgd", attention, v).reshape(batch, 1, heads, size)


def train_step(
    config: DenseConfig, *, name: Name = checkpoint_name, attend: Attend = causal_attention
) -> tuple[Step, tuple[Tree, Tree, Batch]]:
    """Return one optimizer step of `config` and the shapes of its arguments.

    Args:
        config: the dimensions, a preset or your own.
        name: `name(x, label)` returns `x`, named and perhaps constrained; the labels are those of `ACTIVATION_DIMS`.
        attend: attention in place of `causal_attention`, such as a kernel's.

    Returns:
        `(fn, args)` with `fn(params, opt_state, batch) -> (params, opt_state, loss)` and
        `args = (params, opt_state, batch)` as trees of `jax.ShapeDtypeStruct`:
        `batch = {"tokens": i32[B, S], "targets": i32[B, S]}`, `opt_state = {"count", "m", "v"}`, loss f32[].

    Example:
        >>> fn, args = train_step(scaled_down(PRESETS["8b"]))
        >>> jax.eval_shape(fn, *args)[2]
        ShapeDtypeStruct(shape=(), dtype=float32)

    """

    def step(params: Tree, opt_state: Tree, batch: Batch) -> tuple[Tree, Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(_loss)(params, batch, config, name, attend)
        params, opt_state = optimizer.update(params, gradients, opt_state)
        return params, opt_state, loss

    optimizer = OPTIMIZERS[config.optimizer]
    params = _parameter_shapes(config)
    ids = _token_shape(config)
    return step, (params, jax.eval_shape(optimizer.init, params), {"tokens": ids, "targets": ids})


def forward(
    config: DenseConfig, *, name: Name = checkpoint_name, attend: Attend = causal_attention
) -> tuple[Callable[[Tree, jax.Array], jax.Array], tuple[Tree, Any]]:
    """Return the forward pass of `config` and the shapes of its arguments.

    Args:
        config: the dimensions.
        name: as for `train_step`.
        attend: as for `train_step`.

    Returns:
        `(fn, args)` with `fn(params, tokens) -> logits`; tokens i32[B, S], logits f32[B, S, V].

    """

    def logits(params: Tree, tokens: jax.Array) -> jax.Array:
        return _logits(params, tokens, config, name, attend)

    return logits, (_parameter_shapes(config), _token_shape(config))


def decode_step(
    config: DenseConfig, *, name: Name = checkpoint_name
) -> tuple[Callable[[Tree, Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]], tuple[Any, ...]]:
    """Return the step that makes one more token for every sequence, and the shapes of its arguments.

    Args:
        config: the dimensions, `scan=True`; `seq` is the length of the cache.
        name: as for `train_step`.

    Returns:
        `(fn, args)` with `fn(params, cache, tokens, position) -> (logits, cache)`; tokens i32[B], the position that
        all of them stand at i32[], logits f32[B, V], `cache = {"k", "v"}`, both [L, B, S, K, D] of the compute type.

    Raises:
        ValueError: the layers are not stacked.

    """
    if not config.scan:
        raise ValueError(f"DenseConfig {config.name!r}: decode_step scans over the layers; set scan=True")

    def step(params: Tree, cache: Tree, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
        x = name(params["embed"][tokens[:, None]].astype(config.dtype), "embedded")
        tables = _rotary_tables(config.seq, config.head_dim)
        cos, sin = (jax.lax.dynamic_slice_in_dim(table, position, 1) for table in tables)

        def block(x: jax.Array, layer: Tree) -> tuple[jax.Array, Tree]:
            weights, cache = layer
            made: dict[str, jax.Array] = {}

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                for key, new in (("k", k), ("v", v)):
                    made[key] = jax.lax.dynamic_update_slice_in_dim(cache[key], new, position, axis=1)
                return _attention_until(q, made["k"], made["v"], position)

            return _block(x, weights, cos, sin, config, name, attend), made

        x, cache = jax.lax.scan(block, x, (params["blocks"], cache))
        return _head(x, params, config, name)[:, 0], cache

    kept = jax.ShapeDtypeStruct(
        (config.layers, config.batch, config.seq, config.kv_heads, config.head_dim), config.dtype
    )
    token, position = jax.ShapeDtypeStruct((config.batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return step, (_parameter_shapes(config), {"k": kept, "v": kept}, token, position)


def init(config: DenseConfig, key: jax.Array) -> Tree:
    """Draw f32 parameters: normal, with the variance of one over the inputs of each output.

    Args:
        config: the dimensions; small ones, since this allocates all of them.
        key: a `jax.random.key`.

    Returns:
        The parameter tree that `train_step(config)` takes. The same key gives equal weights
        for `scan=True` and `scan=False`.

    """
    embed_key, head_key, blocks_key = jax.random.split(key, 3)
    block_keys = jax.random.split(blocks_key, config.layers)
    if config.scan:
        blocks: Tree = jax.vmap(lambda key: _init_block(config, key))(block_keys)
    else:
        blocks = [_init_block(config, key) for key in block_keys]
    params = {
        "embed": _normal(embed_key, (config.vocab, config.d_model), config.d_model),
        "blocks": blocks,
        "norm": jnp.ones((config.d_model,)),
    }
    if not config.tie:
        params["head"] = _normal(head_key, (config.d_model, config.vocab), config.d_model)
    return params


def _init_block(config: DenseConfig, key: jax.Array) -> Tree:
    d, h, n, k, size = config.d_model, config.d_ff, config.heads, config.kv_heads, config.head_dim
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "wq": ((d, n, size), d),
        "wk": ((d, k, size), d),
        "wv": ((d, k, size), d),
        "wo": ((n, size, d), n * size),
        "up": ((d, h), d),
        "down": ((h, d), h),
    }
    if config.gated:
        shapes["gate"] = ((d, h), d)
    if config.experts > 1:
        for label in ("up", "gate", "down"):
            shape, fan_in = shapes[label]
            shapes[label] = ((config.experts, *shape), fan_in)
        shapes["router"] = ((d, config.experts), d)
    keys = jax.random.split(key, len(shapes))
    block = {name: _normal(key, *shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    norms = ("attention_norm",) if config.parallel else ("attention_norm", "mlp_norm")
    return block | {name: jnp.ones((d,)) for name in norms}


def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)


def _parameter_shapes(config: DenseConfig) -> Tree:
    drawn = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, config.weight_dtype), drawn)


def _token_shape(config: DenseConfig) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32)


def _loss(params: Tree, batch: Batch, config: DenseConfig, name: Name, attend: Attend) -> jax.Array:
    """Mean softmax cross-entropy in f32 of logits [B, S, V] against integer targets [B, S]."""
    logits = _logits(params, batch["tokens"], config, name, attend)
    picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _logits(params: Tree, tokens: jax.Array, config: DenseConfig, name: Name, attend: Attend) -> jax.Array:
    """Logits f32[B, S, V] of tokens i32[B, S]."""
    dtype = jnp.dtype(config.dtype)
    x = name(params["embed"][tokens].astype(dtype), "embedded")
    cos, sin = _rotary_tables(config.seq, config.head_dim)

    def block(x: jax.Array, weights: Tree) -> jax.Array:
        return _block(x, weights, cos, sin, config, name, attend)

    if config.remat:
        block = jax.checkpoint(block, policy=_remat_policy(config))
    if config.scan:
        x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["blocks"])
    else:
        for weights in params["blocks"]:
            x = block(x, weights)

    return _head(x, params, config, name)


def _block(
    x: jax.Array,
    weights: Tree,
    cos: jax.Array,
    sin: jax.Array,
    config: DenseConfig,
    name: Name,
    attend: Attend,
) -> jax.Array:
    """One layer on x [B, S, M]."""
    x = name(x, "block_in")
    normed = _rms_norm(x, weights["attention_norm"])
    attended = _attention(normed, weights, cos, sin, name, attend)
    if config.parallel:
        return x + attended + _mlp(normed, weights, config, name)
    x = x + attended
    return x + _mlp(_rms_norm(x, weights["mlp_norm"]), weights, config, name)


def _head(x: jax.Array, params: Tree, config: DenseConfig, name: Name) -> jax.Array:
    """Logits f32[B, S, V] of what the last layer leaves."""
    x = _rms_norm(x, params["norm"])
    head = params["embed"].T if config.tie else params["head"]
    logits = jnp.einsum("bsm,mv->bsv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return name(logits, "logits")


def _remat_policy(config: DenseConfig) -> Any:
    """Policy of `jax.checkpoint` that keeps what the configuration says."""
    if not (config.saved or config.offloaded):
        return None
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=config.saved,
        names_which_can_be_offloaded=config.offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def _attention(
    x: jax.Array, weights: Tree, cos: jax.Array, sin: jax.Array, name: Name, attend: Attend
) -> jax.Array:
    """Causal attention of x [B, S, M], N query heads sharing K key-value heads in groups of G = N / K."""
    q = jnp.einsum("bsm,mnd->bsnd", x, weights["wq"].astype(x.dtype))
    k = jnp.einsum("bsm,mkd->bskd", x, weights["wk"].astype(x.dtype))
    v = jnp.einsum("bsm,mkd->bskd", x, weights["wv"].astype(x.dtype))
    q, k, v = name(_rotate(q, cos, sin), "query"), name(_rotate(k, cos, sin), "key"), name(v, "value")
    context = name(attend(q, k, v), "context")
    return name(jnp.einsum("bsnd,ndm->bsm", context, weights["wo"].astype(x.dtype)), "attention_out")


def _mlp(x: jax.Array, weights: Tree, config: DenseConfig, name: Name) -> jax.Array:
    """Feed-forward layer of x [B, S, M]: silu-gated with three matrices, or gelu with two, or experts."""
    if config.experts > 1:
        return routed_mlp(x, weights, config.routed, config.capacity, name)
    up = name(jnp.einsum("bsm,mh->bsh", x, weights["up"].astype(x.dtype)), "up")
    if config.gated:
        gate = name(jnp.einsum("bsm,mh->bsh", x, weights["gate"].astype(x.dtype)), "gate")
        hidden = jax.nn.silu(gate) * up
    else:
        hidden = jax.nn.gelu(up)
    return name(jnp.einsum("bsh,hm->bsm", hidden, weights["down"].astype(x.dtype)), "mlp_out")


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Scale x [..., M] to unit root mean square over M, in f32, then by `scale` [M]."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(x.dtype)


def _rotary_tables(seq: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines f32[S, 1, D/2] of the rotary embedding (Su et al., 2021), base 10000."""
    frequency = 10000.0 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the halves of each head of x [B, S, heads, D] by the angle of its position."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def dense_100m() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "100m": for a first look, on a handful of cores."""
    return train_step(PRESETS["100m"])


def dense_1b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "1b"."""
    return train_step(PRESETS["1b"])


def dense_8b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "8b": grouped-query attention, sized for 128 v3 cores."""
    return train_step(PRESETS["8b"])


def dense_64b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "64b", sized for 512 v3 cores."""
    return train_step(PRESETS["64b"])


def dense_128b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "128b", sized for 2048 v3 cores."""
    return train_step(PRESETS["128b"])


def dense_175b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "175b", sized for 2048 v3 cores."""
    return train_step(PRESETS["175b"])


def dense_256b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "256b", sized for 2048 v3 cores."""
    return train_step(PRESETS["256b"])


def dense_512b() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "512b", sized for 2048 v3 cores."""
    return train_step(PRESETS["512b"])


def dense_1t() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "1t", sized for 2048 v3 cores."""
    return train_step(PRESETS["1t"])
