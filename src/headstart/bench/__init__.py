"""Measure: what depth earns on this machine, and whether it changes anything."""
