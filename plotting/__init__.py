"""Curves, gaps and tables of finished and running sweeps. Imports neither torch nor ``engine`` nor ``lptctl``.

Reads run directories by their documented format (``docs/run-directory.md``); ``docs/plot.md`` says what each number and
band means. The entry point is :func:`plotting.api.make_report`.
"""
