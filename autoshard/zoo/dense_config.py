"""The sizes of the dense Transformers: configurations, presets, and their arithmetic.

Plain integers, no arrays: `autoshard.zoo.dense` turns a `DenseConfig` into a program. The presets from "64b"
up are the dense models of the GSPMD paper and of its authors' published configurations.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard.zoo.optimizers import OPTIMIZERS

ACTIVATION_DIMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embedded": ("batch", "seq", "model"),
        "block_in": ("batch", "seq", "model"),
        "query": ("batch", "seq", "heads", "head"),
        "key": ("batch", "seq", "kv_heads", "head"),
        "value": ("batch", "seq", "kv_heads", "head"),
        "context": ("batch", "seq", "heads", "head"),
        "attention_out": ("batch", "seq", "model"),
        "up": ("batch", "seq", "ff"),
        "gate": ("batch", "seq", "ff"),
        "mlp_out": ("batch", "seq", "model"),
        "dispatched": ("experts", "batch", "slot", "model"),
        "expert_up": ("experts", "batch", "slot", "ff"),
        "expert_gate": ("experts", "batch", "slot", "ff"),
        "expert_out": ("experts", "batch", "slot", "model"),
        "logits": ("batch", "seq", "vocab"),
    }
)
"""Names that the program gives its activations, and what the dims of each mean. "block_in" is what a block gets,
"embedded" what the first one does."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Dimensions of a decoder-only Transformer and of the batch it is trained on.

    Attributes:
        name: label, for tables.
        layers: number of blocks, L.
        d_model: width of the residual stream, M.
        d_ff: width of the feed-forward layer, H.
        heads: query heads, N.
        kv_heads: key and value heads, K; divides `heads`.
        head_dim: size of a head, D; even, since rotary positions turn pairs.
        vocab: tokens of the vocabulary, V.
        batch: global batch, in sequences, B.
        seq: tokens per sequence, S.
        gated: silu-gated feed-forward with three matrices, else gelu with two.
        experts: feed-forward layers side by side, gated, of which each token goes to some; 1 for a plain layer.
        routed: experts that a token goes to.
        capacity: room of an expert, in units of the tokens that it gets when all get alike.
        parallel: attention and feed-forward side by side, behind one norm, else one after the other.
        scan: stack the layers' weights and scan over them, else unroll.
        remat: recompute each block's activations in the backward pass.
        saved: with `remat`, activations that are kept all the same, by their names in `ACTIVATION_DIMS`.
        offloaded: with `remat`, those that are kept in the host's memory.
        tie: use the embedding table as the output head.
        dtype: compute type.
        weight_dtype: type of the parameters.
        optimizer: `"adam"` or `"adafactor"`, of `autoshard.zoo.optimizers`.

    Raises:
        ValueError: a dimension is not positive, or one does not divide as stated; all are listed.

    """

    name: str
    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    batch: int
    seq: int
    gated: bool = True
    experts: int = 1
    routed: int = 1
    capacity: float = 1.25
    parallel: bool = False
    scan: bool = True
    remat: bool = True
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    tie: bool = False
    dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    optimizer: str = "adam"

    def __post_init__(self) -> None:
        faults = [
            f"{field.name}={value} must be at least 1"
            for field in dataclasses.fields(self)
            if field.type is int and (value := getattr(self, field.name)) < 1
        ]
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            faults.append(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            faults.append(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.experts > 1 and not (self.gated and self.routed <= self.experts):
            faults.append(
                f"experts={self.experts} are gated, and a token goes to routed={self.routed} of them at most"
            )
        for name in (*self.saved, *self.offloaded):
            if name not in ACTIVATION_DIMS:
                faults.append(f"no activation is called {name!r}; choose from: {', '.join(ACTIVATION_DIMS)}")
        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer={self.optimizer!r} must be one of: {', '.join(OPTIMIZERS)}")
        if faults:
            raise ValueError(f"DenseConfig {self.name!r}: " + "; ".join(faults))


def parameter_count(config: DenseConfig) -> int:
    """Count the parameters, norms and embedding table included.

    Args:
        config: the dimensions.

    Returns:
        Number of scalars in the parameter tree.

    Example:
        >>> f"{parameter_count(PRESETS['8b']):,}"
        '8,030,261,248'

    """
    c = config
    attention = c.d_model * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    mlp = _mlp_parameters(c) * c.experts + (c.d_model * c.experts if c.experts > 1 else 0)
    tables = c.vocab * c.d_model * (1 if c.tie else 2)
    norms = c.d_model * (1 if c.parallel else 2)
    return c.layers * (attention + mlp + norms) + tables + c.d_model


def _mlp_parameters(config: DenseConfig) -> int:
    return config.d_model * config.d_ff * (3 if config.gated else 2)


def weight_dims(config: DenseConfig) -> dict[str, Any]:
    """Tell what the dims of each parameter mean.

    Args:
        config: the dimensions.

    Returns:
        A tree like the parameters; each leaf a tuple of names: those of `ACTIVATION_DIMS`, "layers" for the stack
        of a scan, and "table" for the width of the embedding table.

    Example:
        >>> weight_dims(PRESETS["8b"])["blocks"]["wq"]
        ('layers', 'model', 'heads', 'head')

    """
    block: dict[str, tuple[str, ...]] = {
        "wq": ("model", "heads", "head"),
        "wk": ("model", "kv_heads", "head"),
        "wv": ("model", "kv_heads", "head"),
        "wo": ("heads", "head", "model"),
        "up": ("model", "ff"),
        "down": ("ff", "model"),
        "attention_norm": ("norm",),
    }
    if config.gated:
        block["gate"] = ("model", "ff")
    if not config.parallel:
        block["mlp_norm"] = ("norm",)
    if config.experts > 1:
        block |= {key: ("experts", *block[key]) for key in ("up", "gate", "down")}
        block["router"] = ("model", "experts")
    scanned = {name: ("layers", *dims) for name, dims in block.items()}
    tree: dict[str, Any] = {"embed": ("vocab", "table"), "norm": ("norm",)}
    tree["blocks"] = scanned if config.scan else [dict(block) for _ in range(config.layers)]
    if not config.tie:
        tree["head"] = ("model", "vocab")
    return tree


def model_flops(config: DenseConfig) -> int:
    """Count the floating-point operations that one step needs, recomputation left out.

    With P parameters, T = B * S tokens: `6 * P * T + 12 * L * N * D * S * T`. Two operations per
    multiply-add, forward once and backward twice; the second term is the two matmuls of attention over the
    full S x S square, the causal half not taken off. P leaves out an untied embedding table, which is looked
    up and not multiplied, and the experts that a token does not go to. Divided by the step's seconds and the
    slice's peak this is the model FLOPs utilization (MFU).

    Args:
        config: the dimensions.

    Returns:
        Operations per train step of the whole batch, in flops.

    Reference:
        Chowdhery et al., "PaLM", 2022, appendix B; there P is all parameters, of tied tables.

    """
    c = config
    tokens = c.batch * c.seq
    idle = (0 if c.tie else c.vocab * c.d_model) + c.layers * _mlp_parameters(c) * (c.experts - c.routed)
    attention_per_token = 12 * c.layers * c.heads * c.head_dim * c.seq
    return (6 * (parameter_count(c) - idle) + attention_per_token) * tokens


def scaled_down(config: DenseConfig, *, dtype: str = "float32") -> DenseConfig:
    """Return a tiny sibling: the same structure in two layers, for running on a CPU.

    Every dimension except the layers is a multiple of 8 (heads and batch too), so that meshes of up to 8
    divide it. Grouped-query attention stays grouped.

    Args:
        config: the configuration to imitate.
        dtype: compute type; f32 by default, so that numbers compare tightly.

    """
    grouped = config.kv_heads < config.heads
    return dataclasses.replace(
        config,
        name=f"{config.name}-small",
        layers=2,
        d_model=64,
        d_ff=128,
        heads=16 if grouped else 8,
        kv_heads=8,
        head_dim=8,
        vocab=128,
        batch=8,
        seq=16,
        dtype=dtype,
    )


_SMALL = (
    DenseConfig(
        name="100m",
        layers=8,
        d_model=1024,
        d_ff=2048,
        heads=16,
        kv_heads=8,
        head_dim=64,
        vocab=32000,
        batch=64,
        seq=1024,
        tie=True,
    ),
    DenseConfig(
        name="1b",  # the dimensions of Llama 3.2 1B
        layers=16,
        d_model=2048,
        d_ff=8192,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128256,
        batch=128,
        seq=1024,
        tie=True,
    ),
    DenseConfig(
        name="8b",  # the dimensions of Llama 3 8B; 2048 tokens per core on 128 cores
        layers=32,
        d_model=4096,
        d_ff=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        batch=256,
        seq=1024,
    ),
)


def _wide(name: str, layers: int, batch: int) -> DenseConfig:
    """Make a model of the paper's wide family: only depth and batch differ."""
    return DenseConfig(
        name=name,
        layers=layers,
        d_model=8192,
        d_ff=65536,
        heads=128,
        kv_heads=128,
        head_dim=128,
        vocab=32000,
        batch=batch,
        seq=1024,
        tie=True,
    )


# 128b and 175b with their batches: lingvo, tasks/lm/params/synthetic_packed_input.py, DenseLm128B32x32 and
# DenseLm175B32x32. The depths of 64b, 256b, 512b and the size of 1t follow the dense models of
# arXiv 2105.04663; their batches are chosen here, for 512 cores (64b) and 2048 cores (the others).
_PAPER = (
    _wide("64b", 32, 256),
    _wide("128b", 64, 512),
    DenseConfig(
        name="175b",
        layers=96,
        d_model=12288,
        d_ff=49152,
        heads=96,
        kv_heads=96,
        head_dim=128,
        vocab=32000,
        batch=1024,
        seq=2048,
        gated=False,
        tie=True,
    ),
    _wide("256b", 128, 512),
    _wide("512b", 256, 256),
    DenseConfig(
        name="1t",
        layers=128,
        d_model=16384,
        d_ff=131072,
        heads=256,
        kv_heads=256,
        head_dim=128,
        vocab=32000,
        batch=256,
        seq=1024,
        tie=True,
    ),
)

PRESETS: Mapping[str, DenseConfig] = MappingProxyType({config.name: config for config in _SMALL + _PAPER})
"""Name -> configuration, small to large."""
