"""From a grouped program and decisions to a per-device program that runs and can be priced."""
