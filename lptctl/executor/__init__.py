"""Executors run frozen runs. ``local`` is the only one so far."""
