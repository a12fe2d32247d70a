import pytest
import torch

import command
from command import exit_status


@pytest.mark.parametrize(
    "error, status, told",
    [
        (ValueError("what, and what to do."), 2, "error: what, and what to do.\n"),
        (KeyboardInterrupt(), 130, "interrupted.\n"),
        (MemoryError(), 2, "error: there is too little memory; give a smaller --batch.\n"),
        (torch.OutOfMemoryError("x"), 2, "too little memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "too little memory"),
        (BrokenPipeError(), 141, ""),
        (OSError(28, "No space left"), 1, "error: the output cannot be used: No space left.\n"),
        (OSError(13, "denied", "val.bin"), 1, "error: val.bin cannot be used: denied.\n"),
    ],
)
def test_what_stops_a_command_is_told_in_a_sentence(monkeypatch, capsys, error, status, told):
    def work():
        raise error

    monkeypatch.setattr(command, "silence", lambda stream: None)
    assert exit_status(work, instead="a smaller --batch") == status
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == (told != "")


def test_a_command_that_is_not_stopped_has_its_own_status(capsys):
    assert [exit_status(lambda: n, instead="") for n in (None, 0, 3)] == [0, 0, 3]
    assert capsys.readouterr().err == ""


def test_an_error_of_ours_keeps_its_traceback():
    def work():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        exit_status(work, instead="")
