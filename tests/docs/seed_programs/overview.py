"""Program of the overview of recurrent modules: modes, flat batches of sequences, backends, precision."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from recurl.modules import (
    GRUModule,
    get_recurrent_matmul_precision,
    set_recurrent_matmul_precision,
    set_recurrent_mode,
)


def flat_batch() -> TensorDict:
    """Three sequences, of 3, 1 and 4 steps, one after another; only the flag says where each begins."""
    is_init = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool).unsqueeze(-1)
    return TensorDict(
        {"observation": torch.randn(8, 4), "recurrent_state": torch.randn(8, 1, 64), "is_init": is_init}, [8]
    )


def modes() -> None:
    """A flat batch is a set of independent sequences, each starting from the state stored at its first step."""
    gru = GRUModule(
        input_size=4,
        hidden_size=64,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    batch = flat_batch()
    stored = batch.clone()
    with set_recurrent_mode("recurrent"):
        batch = gru(batch)
    assert batch["features"].shape == (8, 64)
    assert batch["next", "recurrent_state"].shape == (8, 1, 64)

    for first, end in ((0, 3), (3, 4), (4, 8)):
        outputs, _ = torch_gru(gru, stored["observation"][first:end], stored["recurrent_state"][first])
        torch.testing.assert_close(batch["features"][first:end], outputs)

    # By default a module takes one step per element of the batch.
    steps = gru(stored.clone())
    torch.testing.assert_close(steps["next", "recurrent_state"].squeeze(-2), steps["features"])
    assert not torch.allclose(steps["features"], batch["features"])


def torch_gru(gru: GRUModule, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of torch.nn for ``inputs`` ``[T, 4]`` and ``state`` ``[1, 64]`` with the same weights."""
    net = torch.nn.GRU(4, 64)
    net.load_state_dict(gru.gru.state_dict())
    return net(inputs, state)


def backends() -> None:
    """All backends give the same numbers."""
    batch, features = flat_batch(), []
    torch.manual_seed(0)
    weights = GRUModule(input_size=4, hidden_size=64, in_key="observation", out_key="features").state_dict()
    for backend in ("pad", "scan", "auto"):
        gru = GRUModule(
            input_size=4, hidden_size=64, in_key="observation", out_key="features", recurrent_backend=backend
        )
        gru.load_state_dict(weights)
        with set_recurrent_mode("recurrent"):
            features.append(gru(batch.clone())["features"])
    torch.testing.assert_close(features[1], features[0])
    torch.testing.assert_close(features[2], features[0])


def precision() -> None:
    """A preset resolves to a precision of the hardware; a module's setting takes precedence over the process's."""
    set_recurrent_matmul_precision("high-prec")
    try:
        gru = GRUModule(
            input_size=4,
            hidden_size=64,
            recurrent_backend="triton",
            recurrent_matmul_precision="auto",
            in_keys=["observation", "recurrent_state", "is_init"],
            out_keys=["features", ("next", "recurrent_state")],
        )
        assert gru.recurrent_matmul_precision == "auto"
        assert get_recurrent_matmul_precision(torch.device("cpu")) == "ieee"  # no tensor cores
    finally:
        set_recurrent_matmul_precision("auto")


def main() -> None:
    modes()
    backends()
    precision()


if __name__ == "__main__":
    main()
