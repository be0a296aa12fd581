"""Measure how fast a model decodes at each depth, and whether its head is sound."""
