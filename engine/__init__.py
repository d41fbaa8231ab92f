"""The training engine of lptctl: numerics, recipes, models and the trainer. Importing this package imports no torch."""
