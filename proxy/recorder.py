"""Keeps the records of the last requests as files, for `derender-proxy replay`.

The law: a request never waits for a disk and never fails for one. Files are written whole or not at all, by one thread.
"""

import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from proxy.record import Record

logger = logging.getLogger("proxy")

MOST_WAITING = 256
"""Records that wait for a slow disk; what comes beyond is not kept."""


class FileRecorder:
    """`last` files at most are kept in `directory`, which is made where there is none."""

    def __init__(self, directory: str, last: int, *, with_prompts: bool) -> None:
        self._directory, self._last = Path(directory).expanduser(), last
        self.with_prompts = with_prompts
        self._writer = ThreadPoolExecutor(1, "records")
        self._waiting = 0
        self._number = 0

    def keep(self, record: Record) -> None:
        if self._waiting >= MOST_WAITING:
            logger.warning("record_dir: the disk is too slow; the record of %s is not kept", record.id)
            return
        self._waiting += 1
        self._number += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        safe_id = re.sub(r"[^\w-]", "_", record.id, flags=re.ASCII)[:80]
        self._writer.submit(self._write, record, f"{stamp}-{self._number:06d}-{safe_id}.json")

    def _write(self, record: Record, name: str) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            unfinished = self._directory / f".{name}.part"
            unfinished.write_bytes(record.dump())
            os.replace(unfinished, self._directory / name)
            for old in sorted(self._directory.glob("*.json"))[: -self._last]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("record_dir: the record of %s cannot be written: %s", record.id, error)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Waits for the last files."""
        self._writer.shutdown()
