"""From a user's mistake to one line on stderr and exit code 2, for all commands."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfm.cli.garbage import no_collection

MISTAKE, INTERRUPTED, TERMINATED = 2, 128 + signal.SIGINT, 128 + signal.SIGTERM
PACKAGE = Path(__file__).resolve().parents[1]
LESS_MEMORY = ("smaller batches need less, by data.tokens_per_batch or --batch-size; a training step also with more "
               "optimizer.accumulate or model.remat='full', and `tfm plan` tells what it needs")


def start(module: str, argv: Sequence[str] | None = None) -> int:
    """Import a command's module and give the exit code of its `main`; Ctrl-C during the import is one line, too.

    Args:
        module: such as "tfm.cli.decode".
        argv: what `main` is called with.

    Example:
        >>> start("tfm.cli.main", [])  # doctest: +ELLIPSIS
        usage: tfm COMMAND ...
        0
    """
    try:
        with no_collection():
            command = importlib.import_module(module)
        return int(command.main(argv))
    except KeyboardInterrupt:
        return _interrupted()


def run_main(command: Callable[[], int]) -> int:
    """Run a command and give its exit code: 2, after one line on stderr, for a user's mistake.

    A mistake is a ValueError or ImportError that this package raises itself, any OSError (a missing file, no space
    left), or more work at a time than the memory of the host or of a device holds. Everything else is a defect of ours
    and shows its traceback.

    Args:
        command: gives the exit code.

    Example:
        >>> run_main(lambda: 0)
        0
    """
    import jax

    jax.config.update("jax_traceback_filtering", "off")  # or errors inside JAX would look like ours
    try:
        with _sigterm_raises():
            return command()
    except KeyboardInterrupt:
        return _interrupted()
    except _Terminated:
        print("terminated", file=sys.stderr)
        return TERMINATED
    except BrokenPipeError:
        # The reader went away, as `head` does; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(_os_message(error))
    except (ValueError, ImportError) as error:
        if not _raised_here(error):
            raise
        return _complain(str(error))
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED")):
            raise
        return _complain(f"no memory left ({str(error).partition(chr(10))[0]}): {LESS_MEMORY}")


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that it is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _complain(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return MISTAKE


def _os_message(error: OSError) -> str:
    if error.filename is None:
        return str(error.strerror or error) if error.errno == errno.ENOSPC else str(error)
    return f"{error.filename}: {error.strerror}"


def _raised_here(error: BaseException) -> bool:
    """Whether the innermost frame of a traceback belongs to this package or to a config file."""
    frames = traceback.extract_tb(error.__traceback__)
    last = Path(frames[-1].filename).resolve()
    return PACKAGE in last.parents
