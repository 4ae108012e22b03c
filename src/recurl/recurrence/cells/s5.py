"""S5 (simplified state space layer) cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.recurrence.cells.blocks import check_flags, check_numbers, check_optional_sizes
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.state_space import StateSpace, input_to_state, polar
from recurl.recurrence.cells.time import ONE_STEP, Time, multiply

_SLOWEST = -1e-4  # largest real part, as in the authors' clip_eigs
_GAUSS = (  # nodes on [-1, 1] above 0, and weights, of Gauss and Legendre: exact in float64 for exp of numbers up to 1
    (0.14887433898163122, 0.2955242247147528),
    (0.4333953941292472, 0.2692667193099965),
    (0.6794095682990244, 0.219086362515982),
    (0.8650633666889845, 0.1494513491505804),
    (0.9739065285171717, 0.06667134430868814),
)
_NODES = [*((1 - node) / 2 for node, _ in reversed(_GAUSS)), *((1 + node) / 2 for node, _ in _GAUSS)]  # on [0, 1]
_WEIGHTS = [*(weight / 2 for _, weight in reversed(_GAUSS)), *(weight / 2 for _, weight in _GAUSS)]


@dataclass(frozen=True, repr=False)
class S5Cell(StateSpace, name="s5"):
    """S5 cell: h = exp(L dt) h + (exp(L dt) - 1) / L (B u), y = 2 Re(C h).

    Source: Smith et al., "Simplified state space layers" (2022).

    L is initialized to the diagonal of HiPPO-N, discretized by zero-order hold, with one eigenvalue of each conjugate
    pair; its real part stays below -1e-4. The block consists of a layer norm, the recurrence with skip D u, GELU, a
    gated linear unit ("full GLU") and a skip connection. Lu et al. 2023, who introduced it to reinforcement learning
    with resets in the scan, use four layers of width and state 256 without the norm.

    Args:
        state_size: N, even, number of complex numbers in the state including conjugates, of which N / 2 are stored;
            None for H, rounded up.
        norm: whether the block has a layer norm.
        min_step: smallest initial time step dt, sampled log-uniformly.
        max_step: largest initial time step.
    """

    state_size: int | None = None
    norm: bool = True
    min_step: float = 0.001
    max_step: float = 0.1
    child_name: ClassVar[str] = "s5"

    def __post_init__(self) -> None:
        check_flags(norm=self.norm)
        check_numbers(min_step=self.min_step, max_step=self.max_step)
        check_optional_sizes(state_size=(self.state_size, 2))
        if self.state_size is not None and self.state_size % 2:
            raise ArgumentError(
                f"state_size must be even, since its numbers form conjugate pairs; got {self.state_size}."
            )
        if not 0 < self.min_step <= self.max_step < math.inf:
            raise ArgumentError(
                f"min_step and max_step must be positive, finite and in order, got {self.min_step} and {self.max_step}."
            )

    def modes(self, sizes: Sizes) -> int:
        """Return the number of complex numbers in the state."""
        return (self.state_size or sizes.hidden_size + 1) // 2

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        modes = self.modes(sizes)
        shapes: dict[str, Shape] = {"lambda_re": (modes,), "lambda_im": (modes,), "step_log": (modes,)}
        return shapes | dict(super().parameters(sizes))

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize one parameter. B and C are drawn for HiPPO-N, then rotated by its eigenvectors."""
        size = 2 * self.modes(sizes)
        with torch.no_grad():
            if name in ("lambda_re", "lambda_im"):
                diagonal, _ = hippo(size)
                parameter.copy_(diagonal.real if name == "lambda_re" else diagonal.imag)
            elif name == "step_log":
                parameter.uniform_(math.log(self.min_step), math.log(self.max_step))
            elif name == "weight_b":
                b = torch.randn(size, sizes.hidden_size, dtype=torch.float64) / math.sqrt(size)
                rotated = hippo(size)[1].mH @ b.to(torch.complex128)
                parameter.copy_(torch.view_as_real(rotated).transpose(1, 2).flatten(0, 1))
            elif name == "weight_c":
                c = torch.randn(sizes.hidden_size, size, 2, dtype=torch.float64) / math.sqrt(size)
                rotated = torch.view_as_complex(c) @ hippo(size)[1]
                parameter.copy_(torch.view_as_real(rotated.conj().resolve_conj()).flatten(1))
            else:
                super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        lambda_re: Tensor,
        lambda_im: Tensor,
        step_log: Tensor,
        weight_b: Tensor,
        weight_c: Tensor,
        skip: Tensor,
        weight_glu: Tensor,
        bias_glu: Tensor | None = None,
        scale_norm: Tensor | None = None,
        bias_norm: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x, u = self.block_input(x, weight_in, bias_in, scale_norm, bias_norm)
        real, dt = lambda_re.clamp(max=_SLOWEST), step_log.exp()
        re, im = real * dt, lambda_im * dt
        hold = dt.unsqueeze(-1) * _mean_exp(re, im)
        h = time.recur_complex(polar(re, im), multiply(hold, input_to_state(u, weight_b)), states[0])
        y = 2 * F.linear(h.flatten(1), weight_c) + skip * u
        return self.block_output(x, y, weight_glu, bias_glu), (h,)


def _mean_exp(re: Tensor, im: Tensor) -> Tensor:
    """Return (exp(z) - 1) / z for z = re + i im as pairs, the mean of exp over the line from 0 to z.

    Near 0, the quotient is exact but its derivative is not (two large terms cancel), so the mean is integrated there.
    """
    # Created on the device: a tensor of Python numbers would be copied there, which a CUDA graph can't capture.
    nodes, weights = (torch.stack([re.new_full((), value) for value in values]) for values in (_NODES, _WEIGHTS))
    on_line = polar(re.unsqueeze(-1) * nodes, im.unsqueeze(-1) * nodes)
    integral = (on_line * weights.unsqueeze(-1)).sum(-2)
    exp = polar(re, im)
    exp_minus_one = torch.stack([exp[..., 0] - 1, exp[..., 1]], -1)
    square = (re.square() + im.square()).unsqueeze(-1)
    is_small = square < 1
    # Values that aren't selected also need finite derivatives, since 0 times these is added.
    quotient = multiply(exp_minus_one, torch.stack([re, -im], -1)) / torch.where(is_small, 1, square)
    return torch.where(is_small, integral, quotient)


def hippo(size: int) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of HiPPO-N with negative imaginary part and their eigenvectors.

    Args:
        size: N, even.

    Returns:
        complex128 ``[N / 2]`` and ``[N, N / 2]`` (Smith et al. 2022, appendix B.1).

    Raises:
        MissingDependencyError: NumPy isn't installed.

    Example:
        >>> values, vectors = hippo(8)
        >>> values.real, vectors.shape
        (tensor([-0.5000, -0.5000, -0.5000, -0.5000], dtype=torch.float64), torch.Size([8, 4]))
    """
    values, vectors = _hippo(size)
    return values.clone(), vectors.clone()


@cache
def _hippo(size: int) -> tuple[Tensor, Tensor]:
    try:
        import numpy as np  # noqa: PLC0415 - the other memories don't need it
    except ImportError:
        raise MissingDependencyError("The initial parameters of S5 need NumPy: pip install numpy.") from None

    n = np.arange(size, dtype=np.float64)
    low_rank, scale = np.sqrt(n + 0.5), np.sqrt(2 * n + 1)
    normal = np.diag(n) - np.tril(np.outer(scale, scale)) + np.outer(low_rank, low_rank)
    real = normal.diagonal().mean()
    imaginary, vectors = np.linalg.eigh(-1j * (normal - real * np.eye(size)))
    half = size // 2
    return torch.from_numpy(real + 1j * imaginary[:half]), torch.from_numpy(np.ascontiguousarray(vectors[:, :half]))


S5 = S5Cell()
