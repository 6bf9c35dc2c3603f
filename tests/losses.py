"""What asyncio and aiohttp can only log: exceptions that nobody read, sessions and transports that nobody closed."""

import contextlib
import gc
import logging
from collections.abc import Iterator


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("proxy") and record.levelno < logging.ERROR:
            return  # what an engine did wrong is the proxy's to tell
        self.messages.append(self.format(record))


@contextlib.contextmanager
def nothing_is_lost() -> Iterator[None]:
    """Fails at its end if anything inside it was lost."""
    kept = _Kept()
    loggers = [logging.getLogger(name) for name in ("asyncio", "aiohttp", "proxy")]
    for logger in loggers:
        logger.addHandler(kept)
    try:
        yield
        gc.collect()
    finally:
        for logger in loggers:
            logger.removeHandler(kept)
    assert kept.messages == []
