"""What all tests share: small tensors on one thread, kernels interpreted."""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is first imported


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Threads that hand each other tensors this small take longer than one alone."""
    import torch

    torch.set_num_threads(1)
