"""What a command owes those who run it: exit statuses, streams and signals.

`exit_status` serves benchmarks, evaluation and samples: bad input or too little memory is one sentence
and status 2, a file or an output that cannot be used 1, Ctrl-C 130, and a reader who has gone, as `head`
does, 141. Training outlives its terminal, and ends at a signal only once its step is done and saved.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def exit_status(work: Callable[[], int | None], instead: str) -> int:
    """Does a command's work: the status that it returns, or that of what stopped it, told on stderr.

    instead: what to give where memory is too little.
    """
    open_streams()
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except ValueError as error:
        problem, status = error, 2
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        silence(sys.stdout)  # or Python complains at exit
        return 141
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        problem, status = f"there is too little memory; give {instead}.", 2
    except OSError as error:
        if error.filename is None:
            silence(sys.stdout)  # or what it holds fails once more at exit
        problem, status = f"{error.filename or 'the output'} cannot be used: {error.strerror}.", 1
    print(f"error: {problem}", file=sys.stderr)
    return status


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory; PyTorch has a type for it on GPUs alone."""
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return no_memory or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def open_streams() -> None:
    """Closed streams become the null device; what a terminal cannot spell is printed as `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    sys.stdout.reconfigure(errors="replace")


def silence(stream) -> None:
    """What is written to a broken stream is dropped from here on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Unbreakable:
    """An output stream whose reader may leave, or whose disk may fill: it falls silent."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError:
            silence(self.stream)
        self.flush()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            silence(self.stream)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Work goes on here whatever becomes of stdout and stderr."""
    open_streams()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Unbreakable, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def stop_on_signals():
    """Collects what asks to stop, for the loop to finish its step and save; a second Ctrl-C breaks."""
    received, asking = [], [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        asking.append(signal.SIGHUP)

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        # A large model's step takes minutes on a CPU. Not `print`, which this may have interrupted.
        if number == signal.SIGINT and os.isatty(2) and "RANK" not in os.environ:
            os.write(2, b"\nstopping after this step; Ctrl-C again to leave at once, unsaved\n")
        received.append(number)

    before = {number: signal.signal(number, note) for number in asking}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
