"""Readers: each turns one kind of log into :class:`plotting.schema.RawRun`."""
