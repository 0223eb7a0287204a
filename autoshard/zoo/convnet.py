"""A ResNet train step in plain JAX, with no sharding anywhere.

Bottleneck residual network with batch normalisation in training mode, whose running statistics are carried
as state, max pooling and momentum SGD. It exercises what the Transformers do not: windows and strides, which
need halos when space is sharded; reductions over batch and space inside the network; a state that is neither
parameter nor optimizer. Images are NHWC; convolution weights are HWIO, f32 masters cast where they are used.

`train_step` and the factory `resnet50` return `(fn, args)` with `jax.ShapeDtypeStruct` arguments.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from autoshard.zoo.optimizers import Tree, momentum_init, momentum_update

DONATE = (0, 1, 2)
"""Arguments of the train step whose buffers the results can reuse: parameters, statistics, velocity."""

EXPANSION = 4
"""Ratio of a bottleneck's output channels to its inner channels."""

Batch: TypeAlias = dict[str, Any]
Step: TypeAlias = Callable[[Tree, Tree, Tree, Batch], tuple[Tree, Tree, Tree, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Dimensions of a bottleneck ResNet and of the batch it is trained on.

    Attributes:
        name: label, for tables.
        stages: bottlenecks in each stage; every stage after the first halves the image and doubles the width.
        width: channels of the stem and inner channels of the first stage.
        classes: outputs of the classifier.
        batch: global batch, in images.
        image: height and width of an image, in pixels; the stem and the pooling quarter it.
        dtype: compute type; parameters and statistics stay f32.

    Raises:
        ValueError: the image cannot be halved once for the stem, for the pooling and for each later stage.

    """

    name: str
    stages: tuple[int, ...]
    width: int
    classes: int
    batch: int
    image: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        halvings = len(self.stages) + 1
        if self.image % 2**halvings:
            raise ValueError(
                f"ConvNetConfig {self.name!r}: image={self.image} must be divisible by {2**halvings}: "
                f"the stem, the pooling and {len(self.stages) - 1} later stages each halve it"
            )


PRESETS: Mapping[str, ConvNetConfig] = MappingProxyType(
    {
        # He et al., "Deep residual learning for image recognition", 2015, table 1, with the stride in the 3x3
        # convolution, as most implementations have it; 64 images per core on 128 v3 cores.
        "resnet50": ConvNetConfig(
            name="resnet50", stages=(3, 4, 6, 3), width=64, classes=1000, batch=8192, image=224
        )
    }
)
"""Name -> configuration."""


class Conv(NamedTuple):
    """One convolution: where it is in the tree, and its size."""

    path: tuple[str, ...]
    kernel: int
    inputs: int
    outputs: int
    image: int
    """Height and width of its output, in pixels."""


def convolutions(config: ConvNetConfig) -> Iterator[Conv]:
    """Yield every convolution of the network, stem first; each is followed by a batch normalisation."""
    image = config.image // 2
    yield Conv(("stem",), 7, 3, config.width, image)
    image, channels = image // 2, config.width
    for stage, blocks in enumerate(config.stages):
        inner = config.width * 2**stage
        for block in range(blocks):
            name = f"stage{stage}_block{block}"
            before = image
            if stage > 0 and block == 0:
                image //= 2
            yield Conv((name, "reduce"), 1, channels, inner, before)
            yield Conv((name, "spatial"), 3, inner, inner, image)
            yield Conv((name, "expand"), 1, inner, inner * EXPANSION, image)
            if block == 0:
                yield Conv((name, "shortcut"), 1, channels, inner * EXPANSION, image)
            channels = inner * EXPANSION


def parameter_count(config: ConvNetConfig) -> int:
    """Count the trained parameters: kernels, scales and biases; running statistics are not parameters.

    Args:
        config: the dimensions.

    Returns:
        Number of scalars in the parameter tree.

    Example:
        >>> f"{parameter_count(PRESETS['resnet50']):,}"
        '25,557,032'

    """
    body = sum(c.kernel**2 * c.inputs * c.outputs + 2 * c.outputs for c in convolutions(config))
    return body + (_features(config) + 1) * config.classes


def model_flops(config: ConvNetConfig) -> int:
    """Count the floating-point operations of the convolutions and the classifier in one step.

    Two per multiply-add; forward once and backward twice, though the stem needs no gradient of the image.

    Args:
        config: the dimensions.

    Returns:
        Operations per train step of the whole batch, in flops.

    """
    body = sum(c.kernel**2 * c.inputs * c.outputs * c.image**2 for c in convolutions(config))
    return 3 * 2 * config.batch * (body + _features(config) * config.classes)


def scaled_down(config: ConvNetConfig, *, dtype: str = "float32") -> ConvNetConfig:
    """Return a tiny sibling with every kind of block, for running on a CPU.

    Two stages: an identity shortcut, and projected ones with and without stride. Images stay divisible by 8.

    Args:
        config: the configuration to imitate.
        dtype: compute type; f32 by default, so that numbers compare tightly.

    """
    name = f"{config.name}-small"
    return dataclasses.replace(
        config, name=name, stages=(2, 1), width=8, classes=16, batch=8, image=64, dtype=dtype
    )


def train_step(config: ConvNetConfig) -> tuple[Step, tuple[Tree, Tree, Tree, Batch]]:
    """Return one optimizer step of `config` and the shapes of its arguments.

    Args:
        config: the dimensions, a preset or your own.

    Returns:
        `(fn, args)` with `fn(params, stats, velocity, batch) -> (params, stats, velocity, loss)` and
        `args = (params, stats, velocity, batch)` as trees of `jax.ShapeDtypeStruct`:
        `batch = {"images": [B, image, image, 3] in the compute type, "labels": i32[B]}`, loss f32[].

    Example:
        >>> fn, args = train_step(scaled_down(PRESETS["resnet50"]))
        >>> jax.eval_shape(fn, *args)[3]
        ShapeDtypeStruct(shape=(), dtype=float32)

    """

    def step(params: Tree, stats: Tree, velocity: Tree, batch: Batch) -> tuple[Tree, Tree, Tree, jax.Array]:
        (loss, stats), gradients = jax.value_and_grad(_loss, has_aux=True)(params, stats, batch, config)
        params, velocity = momentum_update(params, gradients, velocity)
        return params, stats, velocity, loss

    params, stats = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    images = _shape((config.batch, config.image, config.image, 3), config.dtype)
    labels = _shape((config.batch,), "int32")
    velocity = jax.eval_shape(momentum_init, params)
    return step, (params, stats, velocity, {"images": images, "labels": labels})


def forward(config: ConvNetConfig) -> tuple[Callable[[Tree, Tree, Any], tuple[Any, Tree]], tuple[Any, ...]]:
    """Return the forward pass in training mode, and the shapes of its arguments.

    Args:
        config: the dimensions.

    Returns:
        `(fn, args)` with `fn(params, stats, images) -> (logits f32[B, classes], stats)`.

    """

    def logits(params: Tree, stats: Tree, images: jax.Array) -> tuple[jax.Array, Tree]:
        return _logits(params, stats, images, config)

    params, stats, _, batch = train_step(config)[1]
    return logits, (params, stats, batch["images"])


def init(config: ConvNetConfig, key: jax.Array) -> tuple[Tree, Tree]:
    """Draw f32 parameters, He-normal, and the statistics before the first batch.

    Args:
        config: the dimensions; small ones, since this allocates all of them.
        key: a `jax.random.key`.

    Returns:
        `(params, stats)`, the first two arguments of the train step.

    """
    params: dict[str, Tree] = {}
    stats: dict[str, Tree] = {}
    head_key, *keys = jax.random.split(key, 1 + len(list(convolutions(config))))
    for conv, conv_key in zip(convolutions(config), keys, strict=True):
        shape = (conv.kernel, conv.kernel, conv.inputs, conv.outputs)
        deviation = (2.0 / (conv.kernel**2 * conv.inputs)) ** 0.5
        leaf = {
            "kernel": deviation * jax.random.normal(conv_key, shape, jnp.float32),
            "scale": jnp.ones((conv.outputs,)),
            "bias": jnp.zeros((conv.outputs,)),
        }
        _put(params, conv.path, leaf)
        _put(stats, conv.path, {"mean": jnp.zeros((conv.outputs,)), "variance": jnp.ones((conv.outputs,))})
    features = _features(config)
    weights = features**-0.5 * jax.random.normal(head_key, (features, config.classes), jnp.float32)
    params["head"] = {"weights": weights, "bias": jnp.zeros((config.classes,))}
    return params, stats


def _shape(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _features(config: ConvNetConfig) -> int:
    return (config.width * EXPANSION) << (len(config.stages) - 1)


def _put(tree: dict[str, Tree], path: tuple[str, ...], leaf: Tree) -> None:
    *parents, last = path
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def _loss(params: Tree, stats: Tree, batch: Batch, config: ConvNetConfig) -> tuple[jax.Array, Tree]:
    """Mean softmax cross-entropy in f32, and the new running statistics."""
    logits, stats = _logits(params, stats, batch["images"], config)
    picked = jnp.take_along_axis(logits, batch["labels"][:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked), stats


def _logits(params: Tree, stats: Tree, images: jax.Array, config: ConvNetConfig) -> tuple[jax.Array, Tree]:
    new_stats: dict[str, Tree] = {}
    x = images.astype(jnp.dtype(config.dtype))
    x, new_stats["stem"] = _conv_norm(x, params["stem"], stats["stem"], stride=2)
    x = _max_pool(jax.nn.relu(x))
    for stage, blocks in enumerate(config.stages):
        for block in range(blocks):
            name = f"stage{stage}_block{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            x, new_stats[name] = _bottleneck(x, params[name], stats[name], stride)
    pooled = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
    return pooled @ params["head"]["weights"] + params["head"]["bias"], new_stats


def _bottleneck(x: jax.Array, params: Tree, stats: Tree, stride: int) -> tuple[jax.Array, Tree]:
    """Residual block of x [B, height, width, channels]: 1x1, 3x3 with the stride, 1x1, plus the shortcut."""
    new_stats: dict[str, Tree] = {}
    y, new_stats["reduce"] = _conv_norm(x, params["reduce"], stats["reduce"], stride=1)
    y, new_stats["spatial"] = _conv_norm(jax.nn.relu(y), params["spatial"], stats["spatial"], stride=stride)
    y, new_stats["expand"] = _conv_norm(jax.nn.relu(y), params["expand"], stats["expand"], stride=1)
    if "shortcut" in params:
        x, new_stats["shortcut"] = _conv_norm(x, params["shortcut"], stats["shortcut"], stride=stride)
    return jax.nn.relu(x + y), new_stats


def _conv_norm(x: jax.Array, params: Tree, stats: Tree, *, stride: int) -> tuple[jax.Array, Tree]:
    """Convolve x [B, height, width, channels] and normalises over batch and space, in f32.

    The running statistics follow with decay 0.9 (Ioffe and Szegedy, "Batch normalization", 2015).
    """
    pad = (params["kernel"].shape[0] - 1) // 2
    y = jax.lax.conv_general_dilated(
        x,
        params["kernel"].astype(x.dtype),
        window_strides=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    wide = y.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(wide), axis=(0, 1, 2)) - jnp.square(mean)
    normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    new_stats = {
        "mean": 0.9 * stats["mean"] + 0.1 * mean,
        "variance": 0.9 * stats["variance"] + 0.1 * variance,
    }
    return normal.astype(x.dtype), new_stats


def _max_pool(x: jax.Array) -> jax.Array:
    """Maximum over 3x3 windows of x [B, height, width, channels], stride 2."""
    pooled: jax.Array = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    return pooled


def resnet50() -> tuple[Step, tuple[Any, ...]]:
    """Build the train step of preset "resnet50": 8192 images of 224 x 224, sized for 128 v3 cores."""
    return train_step(PRESETS["resnet50"])
