"""Recipes: named presets over the switches of the low-precision seam. This package's ``table`` imports no torch."""
