import pytest

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs the hf extra")

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _one_quiet_thread():
    """The models are tiny: threads only cost, and the notes about missing fast kernels say nothing here."""
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)
