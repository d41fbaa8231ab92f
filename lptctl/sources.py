"""Corpus sources as a sweep file names them, checked without reading them."""

from __future__ import annotations

import glob
from pathlib import Path

from lptctl.settings import Wrong


def resolve_source(source: str, folder: Path) -> str:
    """Return a corpus source as the engine gets it: ``stdlib``, or an absolute path or glob.

    Relative ones are relative to the sweep file's folder; that folder's own name may hold ``*`` or ``[``.
    """
    if source == "stdlib" or Path(source).is_absolute():
        return source
    root = str(folder.resolve())
    literal = str(Path(root) / source)
    return literal if not glob.has_magic(source) or Path(literal).exists() else str(Path(glob.escape(root)) / source)


def source_problem(source: str, folder: Path, *, alone: bool) -> Wrong | None:
    """Say what is wrong with a source, if anything; ``alone`` says that it is the only one."""
    if source == "stdlib":
        return None
    if not source.strip():
        return Wrong('"" names no file', "expected stdlib, text files, globs, .jsonl files or one prepared folder")
    try:
        found = resolve_source(source, folder)
        path = Path(found)
        if path.is_file():
            return None
        if path.is_dir():
            if not (path / "meta.json").is_file():
                return Wrong(
                    f'"{source}" is a folder that `lptctl data prepare` did not make',
                    f"its files: {source.rstrip('/')}/**/*.txt",
                )
            return None if alone else Wrong(f'"{source}" is a prepared folder and must be the only source')
        if path.exists():
            return Wrong(f'"{source}" is no regular file')
        if glob.has_magic(source):
            if any(Path(match).is_file() for match in glob.iglob(found, recursive=True)):
                return None
            return Wrong(f'"{source}" matches no file', f"looked for {found}; ** crosses folders")
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        return Wrong(f'"{source}" cannot be a path: {error}')
    if source.startswith("~"):
        return Wrong(f'"{source}" does not exist', "~ is not expanded here; write the home folder out")
    return Wrong(f'"{source}" does not exist', f"looked for {found}; paths are relative to the sweep file")
