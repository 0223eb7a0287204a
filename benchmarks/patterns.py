"""Small train steps, one for each pattern of parallelism, in plain JAX and without sharding.

Shape letters: B examples, S tokens, M model, H hidden, N heads, D head size, E experts, C capacity, V vocabulary.
Sizes are those of a layer that one would shard; nothing is ever allocated. All is f32: XLA's CPU compiler moves
narrow floats as f32, which would count them double.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.zoo import convnet, dense

Tree = Any
Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, the shapes of its arguments, and which arguments are donated."""

_RATE = 1e-3


def _shapes(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _train(loss: Callable[..., jax.Array], params: Tree, *data: Any) -> Program:
    """Make a step of momentum descent on a loss."""

    def step(params: Tree, velocity: Tree, *data: Any) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, *data)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        return jax.tree.map(lambda p, v: p - _RATE * v, params, velocity), velocity, value

    return step, (params, params, *data), (0, 1)


def _square_error(out: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(out - wanted))


def mlp() -> Program:
    """Two layers between equal widths: the pair that tensor parallelism splits."""
    b, m, h = 8192, 1024, 4096

    def loss(p: Tree, x: jax.Array, wanted: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(x @ p["up"] + p["bias"])
        return _square_error(x + hidden @ p["down"], wanted)

    x = _shapes(x=(b, m))["x"]
    return _train(loss, _shapes(up=(m, h), bias=(h,), down=(h, m)), x, x)


def attention() -> Program:
    """One block of self-attention: heads are split, softmax is not."""
    b, s, m, n, d = 32, 512, 1024, 16, 64

    def loss(p: Tree, x: jax.Array, wanted: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsm,mnd->bsnd", x, p[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bsnd,btnd->bnst", q, k) / d**0.5)
        out = jnp.einsum("bnst,btnd->bsnd", scores, v)
        return _square_error(x + jnp.einsum("bsnd,ndm->bsm", out, p["o"]), wanted)

    x = _shapes(x=(b, s, m))["x"]
    return _train(loss, _shapes(q=(m, n, d), k=(m, n, d), v=(m, n, d), o=(n, d, m)), x, x)


def moe() -> Program:
    """A mixture of experts with dispatch and combine masks (Lepikhin et al., arXiv 2006.16668)."""
    b, s, m, h, e, c = 16, 512, 512, 2048, 16, 64

    def loss(p: Tree, x: jax.Array, wanted: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("bsm,me->bse", x, p["gate"]))
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), e)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        dispatch = jax.nn.one_hot(place.astype(jnp.int32), c) * chosen[..., None]
        sent = jnp.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("ebcm,emh->ebch", sent, p["up"]))
        back = jnp.einsum("ebch,ehm->ebcm", hidden, p["down"])
        out = jnp.einsum("bsec,ebcm->bsm", dispatch * gates[..., None], back)
        return _square_error(x + out, wanted)

    x = _shapes(x=(b, s, m))["x"]
    return _train(loss, _shapes(gate=(m, e), up=(e, m, h), down=(e, h, m)), x, x)


def embedding() -> Program:
    """A lookup in a large table, a layer, and the table again as the output head."""
    b, s, v, m = 64, 128, 32768, 512

    def loss(p: Tree, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        x = jnp.tanh(p["table"][tokens] @ p["layer"])
        scores = jax.nn.log_softmax(jnp.einsum("bsm,vm->bsv", x, p["table"]))
        return -jnp.mean(jnp.take_along_axis(scores, wanted[..., None], axis=-1))

    tokens = jax.ShapeDtypeStruct((b, s), jnp.int32)
    return _train(loss, _shapes(table=(v, m), layer=(m, m)), tokens, tokens)


def recurrent() -> Program:
    """A loop over time from a given state; its weights never change, so they are gathered once."""
    b, s, m, h = 512, 64, 512, 2048

    def loss(p: Tree, state: jax.Array, x: jax.Array, wanted: jax.Array) -> jax.Array:
        def cell(state: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(now @ p["enter"] + state @ p["again"]), None

        state, _ = jax.lax.scan(cell, state, x)
        return _square_error(state @ p["leave"], wanted)

    data = _shapes(state=(b, h), x=(s, b, m), wanted=(b, m))
    return _train(loss, _shapes(enter=(m, h), again=(h, h), leave=(h, m)), *data.values())


def convolution() -> Program:
    """Two convolutions, pooling and a classifier."""
    b, image, c, classes = 256, 32, 64, 128

    def loss(p: Tree, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            x = jax.lax.conv_general_dilated(
                x, p[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return _square_error(jnp.mean(x, axis=(1, 2)) @ p["head"], wanted)

    data = _shapes(x=(b, image, image, 16), wanted=(b, classes))
    params = _shapes(first=(3, 3, 16, c), second=(3, 3, c, 4 * c), head=(4 * c, classes))
    return _train(loss, params, data["x"], data["wanted"])


def transformer() -> Program:
    """The zoo's dense Transformer: layers under a scan, recomputed, with Adam."""
    return (*dense.train_step(_dense(scan=True)), dense.DONATE)


def transformer_unrolled() -> Program:
    """The same in two layers written out."""
    return (*dense.train_step(_dense(scan=False)), dense.DONATE)


def _dense(*, scan: bool) -> dense.DenseConfig:
    return dense.DenseConfig(
        name="bench",
        layers=8 if scan else 2,
        d_model=1024,
        d_ff=4096,
        heads=16,
        kv_heads=8,
        head_dim=64,
        vocab=32000,
        batch=32,
        seq=512,
        scan=scan,
        dtype="float32",
    )


def resnet() -> Program:
    """The zoo's bottleneck ResNet, one block per stage."""
    config = convnet.ConvNetConfig(
        name="bench", stages=(1, 1), width=64, classes=128, batch=256, image=64, dtype="float32"
    )
    return (*convnet.train_step(config), convnet.DONATE)


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    builder.__name__: builder
    for builder in (
        mlp,
        attention,
        moe,
        embedding,
        recurrent,
        convolution,
        resnet,
        transformer,
        transformer_unrolled,
    )
}
"""Name -> builder, from the plainest on."""
