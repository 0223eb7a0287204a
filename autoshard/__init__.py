"""Plans, prices and applies the sharding of a JAX function on a TPU slice."""
