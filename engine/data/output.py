"""The output folder of ``prepare``: what may be replaced, what is used again. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config import ConfigError, Problem
from engine.data.folder import is_tidy, lock_beside, tidy
from engine.data.meta import DATA_FILES, Meta, OtherLayoutError, load_meta, made_by_prepare, verify_files
from engine.data.progress import Progress
from engine.data.sources import is_prepared


def out_problem(message: str, hint: str) -> Problem:
    """Return a problem of ``--out``."""
    return Problem(path=("out",), message=message, hint=hint)


def check_out(out: Path) -> list[Problem]:
    """Refuse a place that holds anything but a prepared folder: nothing else is ever replaced, ``--force`` or not."""
    if not (out.exists() or out.is_symlink()):
        return []
    if not out.is_dir():
        return [out_problem(f"{out} exists and is no folder", "give another --out")]
    names = sorted(file.name for file in out.iterdir())
    foreign = [name for name in names if name not in DATA_FILES]
    if foreign:
        return [out_problem(f"{out} holds other files ({', '.join(foreign[:3])})", "give a new folder")]
    if names and not made_by_prepare(out):
        message = f"{out} holds {', '.join(names)}, but `lptctl data prepare` did not make it"
        return [out_problem(message, "give a new folder")]
    return []


@contextmanager
def reserved(out: Path, progress: Progress) -> Iterator[None]:
    """Be the only one who prepares ``out``.

    Raises:
        ConfigError: if ``out`` holds anything but a prepared folder.
        OSError: if nothing can be written beside it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock_beside(out, lambda holder: progress.say(f"waiting for {holder}, which prepares {out}")):
        tidy(out)
        problems = check_out(out)
        if problems:
            raise ConfigError(problems)
        yield


def there_already(out: Path, wanted: Callable[[Meta], bool]) -> Meta | None:
    """Return the meta of ``out`` if it holds, whole, what is wanted and nobody works on it. Writes nothing."""
    if not (is_prepared(out) and is_tidy(out)):
        return None
    try:
        meta = load_meta(out)
        if not wanted(meta):
            return None
        verify_files(out, meta)
    except (ConfigError, OSError):  # damaged, or being replaced just now; reusable() looks again, under the lock
        return None
    return meta


def reusable(
    out: Path, wanted: Callable[[Meta], bool], differs: Callable[[Meta], str], *, force: bool, progress: Progress
) -> Meta | None:
    """Return the meta of ``out`` if it holds, whole, what is wanted, None if it must be written.

    Raises:
        ConfigError: if it holds another corpus and ``force`` is not set: an interrupted run may still need it.
        OSError: if it cannot be read.
    """
    if not is_prepared(out):
        return None
    replace = "give another --out, or --force to replace it; runs that were trained on it then refuse to continue"
    try:
        meta = load_meta(out)
        if wanted(meta):
            verify_files(out, meta)
            return meta
    except OtherLayoutError as error:
        if force:
            return None
        raise ConfigError([out_problem(p.message, replace) for p in error.problems]) from error
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # a disk that does not answer now says nothing about the folder
            raise error.__cause__ from None
        progress.say(f"{out} is damaged and is made again: {error.problems[0].message}")
        return None
    if force:
        progress.say(f"{out} holds another corpus ({meta.digest}) and is replaced: {differs(meta)}")
        return None
    raise ConfigError([out_problem(f"{out} holds another corpus ({meta.digest}): {differs(meta)}", replace)])
