"""Corpora, tokenisers, token shards and deterministic batches. Only ``engine.data.dataset`` imports torch."""
