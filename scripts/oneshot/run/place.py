"""The folder of a run, known by its inode: where it is deleted, moved or replaced in mid-run."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


class Place:
    """A folder that is kept open, so that its files are found wherever it went."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lost(self) -> str | None:
        """Say what became of the folder, in words after its name; None while it is there."""
        ours, there = os.fstat(self._fd), None
        with suppress(OSError):
            there = os.stat(self.folder)
        if there is not None and os.path.samestat(ours, there):
            return None
        if ours.st_nlink == 0:
            return "was deleted" if there is None else "was deleted and made again by another"
        return "was moved away" if there is None else "was replaced by another folder"

    def beside(self, name: str) -> Place:
        """Make a folder `name` beside the lost one, with the files that can still be found."""
        target, ours = self.folder.with_name(name), f"/proc/self/fd/{self._fd}/."
        try:
            target.mkdir(parents=True)
        except OSError:
            target = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        for folder, names, files in os.walk(ours):
            names[:] = [n for n in names if n != "prev"]
            for source in (Path(folder, file) for file in files if file != ".ballast"):
                copy = target / os.path.relpath(source, ours)
                with suppress(OSError):
                    if stat.S_ISREG(source.lstat().st_mode):
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(source, copy)
        os.close(self._fd)
        return Place(target)
