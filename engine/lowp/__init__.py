"""Low-precision Linear layers and the one seam that swaps them in by module path."""
