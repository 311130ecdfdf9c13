"""What a command says of errors that no check of its own foresees."""

import jax.numpy as jnp
import numpy as np
import pytest

from tfm.cli.errors import run_main


@pytest.mark.parametrize("allocate", [
    lambda: jnp.zeros(1 << 46, jnp.int8).block_until_ready(),
    lambda: np.ones(1 << 50),
], ids=["device", "host"])
def test_no_memory_left_is_one_line_with_what_would_help(allocate, capsys):
    assert run_main(allocate) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: no memory left (") and "allocat" in said and "data.tokens_per_batch" in said


def test_other_failures_of_a_device_keep_their_traceback():
    def fail():
        raise RuntimeError("INTERNAL: a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_main(fail)
