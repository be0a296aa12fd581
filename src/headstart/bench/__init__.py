"""Measure how fast a model decodes at each depth, how fast servers answer, and whether a head is sound."""
