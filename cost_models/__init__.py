"""Hardware data and analytical cost formulas; knows no JAX."""
