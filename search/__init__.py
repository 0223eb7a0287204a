"""A solver for choose-one-per-node problems with edge costs and memory over time; knows no JAX."""
