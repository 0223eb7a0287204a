"""A feed-forward layer of experts: each token goes to a few of them, as far as they have room.

Tokens are sent and brought back by products with masks, so that all shapes are static and experts can be split
like any other dim (Lepikhin et al., "GShard", 2020). Letters as in `autoshard.zoo.dense`; E experts with C slots
for every sequence, R experts a token.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["routed_mlp", "slots"]


def slots(seq: int, experts: int, routed: int, capacity: float) -> int:
    """Count the tokens of one sequence that an expert has room for.

    Args:
        seq: tokens of a sequence.
        experts: number of experts.
        routed: experts that a token goes to.
        capacity: room, in units of the tokens that an expert gets when all get alike.

    Example:
        >>> slots(4096, 8, 2, 1.25)
        1280

    """
    return min(seq, math.ceil(seq * routed / experts * capacity))


def routed_mlp(
    x: jax.Array,
    weights: Any,
    routed: int,
    capacity: float,
    name: Callable[[jax.Array, str], jax.Array],
) -> jax.Array:
    """Send x [B, S, M] through silu-gated experts; a token that finds no room is passed over.

    Args:
        x: tokens.
        weights: "router" [M, E], "up" and "gate" [E, M, H], "down" [E, H, M].
        routed: experts that a token goes to.
        capacity: as for `slots`.
        name: `name(x, label)` returns `x`, named.

    Returns:
        Like x; of every token the results of its experts, weighted by the router.

    """
    up, gate, down = (weights[key].astype(x.dtype) for key in ("up", "gate", "down"))
    send, bring = _masks(x, weights["router"].astype(x.dtype), routed, capacity)
    taken = name(jnp.einsum("bsm,bsec->ebcm", x, send), "dispatched")
    opened = name(jnp.einsum("ebcm,emh->ebch", taken, up), "expert_up")
    gates = name(jnp.einsum("ebcm,emh->ebch", taken, gate), "expert_gate")
    made = name(jnp.einsum("ebch,ehm->ebcm", jax.nn.silu(gates) * opened, down), "expert_out")
    return name(jnp.einsum("ebcm,bsec->bsm", made, bring), "mlp_out")


def _masks(x: jax.Array, router: jax.Array, routed: int, capacity: float) -> tuple[jax.Array, jax.Array]:
    """Masks [B, S, E, C] of which slot takes which token: ones, and the router's weights."""
    batch, seq, _ = x.shape
    experts = router.shape[1]
    logits = jnp.einsum("bsm,me->bse", x, router, preferred_element_type=jnp.float32)
    best, chosen = jax.lax.top_k(logits, routed)
    share = jax.nn.softmax(best, axis=-1)
    picked = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).reshape(batch, seq * routed, experts)
    place = ((jnp.cumsum(picked, axis=1) - 1) * picked).reshape(batch, seq, routed, experts)
    picked = picked.reshape(batch, seq, routed, experts)
    room = slots(seq, experts, routed, capacity)
    shape = (batch, seq, experts, room)
    send, bring = jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype)
    for r in range(routed):  # no two of a token's experts are the same
        mask = jax.nn.one_hot(place[:, :, r], room, dtype=x.dtype) * picked[:, :, r, :, None].astype(x.dtype)
        send = send + mask
        bring = bring + mask * share[:, :, r, None, None].astype(x.dtype)
    return send, bring
