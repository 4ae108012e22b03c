"""User-written recurrent modules: correct ones, and ones with a mistake."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torch.nn import functional as F

from recurl.core.specs import TensorSpec, Unbounded
from recurl.envs import EnvBase, InitTracker, TensorDictPrimer
from recurl.sequences.mode import recurrent_mode
from tests.diagnostics.policies import make_env


class OwnMemory(TensorDictModuleBase):
    """Module that steps, or in recurrent mode runs each segment step by step from the state stored at its first step.

    Subclasses implement ``one``: ``[N, 4]``, state ``[N, ...]`` -> features ``[N, F]``, state.
    """

    spec: TensorSpec = Unbounded(8)

    def __init__(self) -> None:
        super().__init__()
        self.in_keys = ["observation", "own", "is_init"]
        self.out_keys = ["features", ("next", "own")]
        self.make()

    def make(self) -> None:
        self.cell = nn.GRUCell(4, 8)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.cell(x, state)
        return state, state

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        shape, length = td.batch_size, td.batch_size[-1] if recurrent_mode() else 1
        x, state = (td[key].reshape(-1, length, *td[key].shape[len(shape) :]) for key in ("observation", "own"))
        starts = td["is_init"].reshape(-1, length).clone()
        ids = td.get(("collector", "traj_ids"), None)
        if recurrent_mode():
            starts[:, 1:] |= False if ids is None else ids.reshape(-1, length).diff(dim=1) != 0
            starts[:, 0] = True
        else:
            state = state.masked_fill(starts.reshape(*starts.shape, *(1 for _ in state.shape[2:])), 0)
        current, outputs, states = state[:, 0], [], []
        for t in range(length):
            current = torch.where(starts[:, t].reshape(-1, *(1 for _ in state.shape[2:])), state[:, t], current)
            features, current = self.one(x[:, t], current)
            outputs.append(features)
            states.append(current)
        for key, values in zip(self.out_keys, (outputs, states), strict=True):
            td.set(key, torch.stack(values, 1).reshape(*shape, *values[0].shape[1:]))
        return td

    def env(self, rows: int | None) -> EnvBase:
        return make_env(rows, InitTracker(), TensorDictPrimer(own=self.spec))


class Frames(OwnMemory):
    """Memory of the last observations."""

    spec = Unbounded(2, 4)

    def make(self) -> None: ...

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.cat([state[:, 1:], x.unsqueeze(1)], 1)
        return state.flatten(1), state


class StoredFrames(Frames):
    """Memory that reads the frames stored at every step, in recurrent mode too: a record that never becomes stale."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        state = td["own"].masked_fill(td["is_init"].unsqueeze(-1), 0.0)
        state = torch.cat([state[..., 1:, :], td["observation"].unsqueeze(-2)], -2)
        return td.set("features", state.flatten(-2)).set(("next", "own"), state)


class Attending(OwnMemory):
    """Attention over the last observations."""

    spec = Unbounded(5, 4)

    def make(self) -> None:
        self.query, self.memory = nn.Linear(4, 8), nn.Linear(4, 16)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.cat([state[:, 1:], x.unsqueeze(1)], 1)
        key, value = self.memory(state).chunk(2, -1)
        weights = (key @ self.query(x).unsqueeze(-1)).softmax(1)
        return (weights * value).sum(1), state


class Counting(OwnMemory):
    """Step counter with a zero-initialized embedding of the count: an integer state."""

    spec = Unbounded(1, dtype=torch.int64)

    def make(self) -> None:
        self.embedding, self.layer = nn.Embedding(100, 8), nn.Linear(4, 8)
        nn.init.zeros_(self.embedding.weight)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.embedding(state.squeeze(-1)) + self.layer(x), state + 1


class Seen(OwnMemory):
    """Memory of an event that never occurs: a boolean state, always False."""

    spec = Unbounded(1, dtype=torch.bool)

    def make(self) -> None:
        self.layer = nn.Linear(5, 8)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = state | (x[:, :1] > 30)
        return self.layer(torch.cat([x, state.float()], -1)), state


class Choosing(OwnMemory):
    """Memory of one of five symbols, encoded as numbers with no other valid values."""

    spec = Unbounded(5)

    def make(self) -> None:
        self.inner, self.outer = nn.Linear(4, 5), nn.Linear(5, 8)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert ((state == 0) | (state == 1)).all()
        new = F.one_hot((self.inner(x) + state).argmax(-1), 5).float()
        return self.outer(new + state), new


class FromZero(OwnMemory):
    """Module that starts every sequence from zero."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        given = td.copy().set("own", torch.zeros_like(td["own"])) if recurrent_mode() else td.copy()
        return td.update(super().forward(given).select(*self.out_keys))


class FramesFromZero(FromZero, Frames):
    """Module that starts every sequence from zero, with another memory."""

    spec = Unbounded(2, 4)


class TorchGRUFromZero(OwnMemory):
    """Module that runs ``torch.nn.GRU`` over each segment without passing it the state."""

    def make(self) -> None:
        self.gru = nn.GRU(4, 8, batch_first=True)

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features, state = self.gru(x.unsqueeze(1), state.unsqueeze(0).contiguous())
        return features.squeeze(1), state.squeeze(0)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if not recurrent_mode():
            return super().forward(td)
        x, starts = td["observation"].reshape(-1, 4), td["is_init"].reshape(-1).clone()
        starts[:: td.batch_size[-1]] = True
        ids = td["collector", "traj_ids"].reshape(-1)
        starts[1:] |= ids.diff() != 0
        lengths = starts.nonzero().squeeze(-1).diff(append=torch.tensor([x.shape[0]]))
        features = torch.cat([self.gru(part.unsqueeze(0))[0][0] for part in x.split(lengths.tolist())])
        features = features.reshape(*td.batch_size, 8)
        return td.set("features", features).set(("next", "own"), features)


class NeverUpdating(OwnMemory):
    """Module that writes the state that it read."""

    def one(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cell(x, state), state


class NotResetting(OwnMemory):
    """Module that carries its state across episode ends in recurrent mode."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if not recurrent_mode():
            return super().forward(td)
        given = td.exclude("collector").set("is_init", torch.zeros_like(td["is_init"]))
        return td.update(super().forward(given).select(*self.out_keys))


class LearnedStart(OwnMemory):
    """Module that starts episodes from a learned state when stepping, but from the stored zeros in recurrent mode."""

    def make(self) -> None:
        super().make()
        self.start = nn.Parameter(torch.ones(8))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        if recurrent_mode():
            return super().forward(td)
        given = td.copy().set("own", torch.where(td["is_init"], self.start, td["own"]))
        given.set("is_init", torch.zeros_like(td["is_init"]))
        return td.update(super().forward(given).select(*self.out_keys))


class Backwards(OwnMemory):
    """Module that returns the features of a sequence in reverse order."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        super().forward(td)
        return td.set("features", td["features"].flip(-2)) if recurrent_mode() else td
