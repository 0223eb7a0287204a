import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard


def step(params, x, y):  # no sharding anywhere
    def loss(p):
        return jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value


bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")  # noqa: E731
args = ({"up": bf16(8192, 32768), "down": bf16(32768, 8192)}, bf16(65536, 8192), bf16(65536, 8192))
batch = {"[1]": P(("data", "model")), "[2]": P(("data", "model"))}  # how the input pipeline delivers it
plan = autoshard.suggest(
    step, *args, topology="v3:4x4", mesh={"data": 4, "model": 8}, annotations=batch, donate_argnums=(0,)
)
print(plan)
