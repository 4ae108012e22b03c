"""A recurrent actor-critic in NumPy, sound or with one fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recurl.conformance import Outputs, Play, Script, Setup, play_steps

UNITS = 8


class Toy:
    """Adapter of the toy; ``fault`` is what is wrong with it."""

    gamma, lmbda, no_agents = 0.9, 0.8, ""
    versions: Mapping[str, str] = {"toy": "1"}

    def __init__(self, fault: str = "", documented: Mapping[str, str] | None = None) -> None:
        self.fault, self.documented = fault, documented or {}

    def make(self, setup: Setup) -> ToyAgent:
        return ToyAgent(setup, self)


class Unknown(Toy):
    """An adapter that documents a check that doesn't exist."""

    def __init__(self) -> None:
        super().__init__(documented={"replai": "its README"})


class NoMake:
    """A class that is no adapter."""

    gamma = 0.9


class Envs:
    """Separate environments."""

    def __init__(self, script: Script) -> None:
        self.envs = [script.make(row) for row in range(script.num_envs)]

    def reset(self) -> Any:
        return np.stack([env.reset()[0] for env in self.envs])

    def step(self, actions: Any) -> list[Any]:
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        return [np.stack(part) for part in zip(*(result[:4] for result in results), strict=True)]

    def following(self, final: Any, ends: Any) -> tuple[Any, Any]:
        """Return the next observations, and which rows are present."""
        seen = [env.reset()[0] if end else one for env, end, one in zip(self.envs, ends, final, strict=True)]
        return np.stack(seen), np.ones(len(seen), bool)


class Agents:
    """The agents of environments; absent ones see zeros."""

    missing = (np.zeros(3, np.float32), 0.0, False, False)

    def __init__(self, script: Script) -> None:
        self.envs = [script.make_agents(env) for env in range(script.num_envs)]

    def reset(self) -> Any:
        return np.stack([seen for env in self.envs for seen in env.reset()[0].values()])

    def step(self, actions: Any) -> list[Any]:
        results = [env.step({}) for env in self.envs]
        return [
            np.stack([result[part].get(name, missing) for result in results for name in self.envs[0].possible_agents])
            for part, missing in enumerate(self.missing)
        ]

    def following(self, final: Any, ends: Any) -> tuple[Any, Any]:
        """Return the next observations, and which agents are present."""
        seen = np.where(ends[:, None], np.float32(0), final).reshape(len(self.envs), -1, 3)
        for env, own in zip(self.envs, seen, strict=True):
            if not env.agents:
                own[:] = np.stack(list(env.reset()[0].values()))
        present = [name in env.agents for env in self.envs for name in env.possible_agents]
        return seen.reshape(-1, 3), np.array(present)


class ToyAgent:
    """An agent with ``h' = tanh(x W + h U)``, a linear value, and a linear logit of action 1."""

    shared = 0.0

    def __init__(self, setup: Setup, toy: Toy) -> None:
        self.setup, self.toy, self.script = setup, toy, setup.script
        seed = None if self.has("unseeded") else setup.seed
        self.weights = self.acting = np.random.default_rng(seed).normal(size=(UNITS + 5, UNITS)) * 0.5
        self.random = np.random.default_rng(setup.seed)
        self.rows = (Agents if self.script.agents > 1 else Envs)(self.script)
        self.seen, rows = self.rows.reset(), self.script.num_rows
        self.starts, self.state, self.present = np.ones(rows, bool), np.zeros((rows, UNITS)), np.ones(rows, bool)
        self.returned, self.steps, self.played = np.zeros(rows, bool), 0, np.zeros(UNITS)

    def has(self, fault: str) -> bool:
        return self.toy.fault == fault

    def step(self, weights: Any, seen: Any, state: Any, starts: Any) -> tuple[Any, Any, Any]:
        """Return the probability of action 1, the value and the next state, all ``[N, ...]``."""
        if self.has("all reset") and starts.any():
            starts = np.ones_like(starts)
        fresh = 0.5 if self.has("other start") and self.steps else 0.0
        state = np.where(starts[:, None], fresh, state)
        if self.has("peeks"):
            places = [place._replace(step=place.step + 1) for place in self.script.find(seen)]
            seen = seen + 0.1 * np.stack([self.script.observation(place) for place in places])
        state = np.tanh(seen @ weights[:3] + (0.0 if self.has("no memory") else state @ weights[3:-2]))
        if self.has("rows mixed"):
            state = state + 0.1 * state.mean(0)
        return 1 / (1 + np.exp(-state @ weights[-1])), state @ weights[-2], state

    def collect(self) -> Outputs:
        weights = self.acting if self.has("acts with old parameters") else self.weights
        if self.has("rollouts apart"):
            self.state = np.zeros_like(self.state)
        if self.has("shared state"):
            self.state = self.state + ToyAgent.shared
            ToyAgent.shared += 0.1
        self.first = self.state.copy()
        steps = [self.act(weights, step) for step in range(self.setup.steps)]
        self.batch = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
        batch, carried, advantages = self.batch, np.zeros(self.script.num_rows), []
        for reward, value, after, ends in zip(
            *(batch[name][::-1] for name in ("rewards", "values", "after", "ends")), strict=True
        ):
            error = reward + self.toy.gamma * after - value
            carried = error + np.where(ends, 0.0, self.toy.gamma * self.toy.lmbda * carried)
            advantages.append(carried)
        batch["advantages"] = np.stack(advantages[::-1])
        return Outputs(*(batch[name] for name in ("seen", "actions", "log_probs", "values", "advantages")))

    def act(self, weights: Any, step: int) -> dict[str, NDArray[Any]]:
        """Take a step; return what is stored of it."""
        first, last = step == 0, step == self.setup.steps - 1
        starts = self.starts & ~(first and self.steps > 0 and self.has("late reset"))
        seen, (likely, values, self.state) = self.seen, self.step(weights, self.seen, self.state, starts)
        taken = (self.random.random(len(seen)) < likely).astype(int)
        before, (final, rewards, terminated, truncated) = self.present, self.rows.step(taken)
        ends = terminated | truncated
        self.seen, self.present = self.rows.following(final, ends)
        state = np.zeros_like(self.state) if self.has("bootstrap without memory") else self.state
        none = np.zeros_like(ends)
        after, advanced = self.step(weights, self.seen if self.has("next episode") else final, state, none)[1:]
        worthless = {
            "bootstrap at terminations": none,
            "no bootstrap at truncations": ends,
            "bootstrap in last steps": none if last else terminated,
            "no bootstrap in last steps": terminated | last,
            "no bootstrap at last truncations": ends if last else terminated,
            "next episode": none,
        }.get(self.toy.fault, terminated)
        self.starts = {
            "no reset at terminations": truncated,
            "no reset at truncations": terminated,
            "reset before the final observation": none,
        }.get(self.toy.fault, ends)
        if self.has("reset before the final observation"):
            self.state = np.where(ends[:, None], self.step(weights, final, self.state, ~none)[2], self.state)
        if self.has("bootstrap advances") and last:
            self.state = advanced
        if self.has("the dead are seen"):
            self.state = self.state + 0.1 * self.step(weights, final[ends], self.state[ends], none[ends])[2].sum(0)
        returned = self.present & ~before
        self.starts = self.starts & self.present if self.has("no reset at returns") else self.starts | returned
        if self.has("agents transposed"):
            self.starts = self.starts.reshape(-1, self.script.agents).T.reshape(-1)
        self.returned = self.returned | returned
        self.steps += 1
        return {
            "seen": seen,
            "starts": starts,
            "actions": taken,
            "log_probs": np.log(np.where(taken == 1, likely, 1 - likely)),
            "values": values,
            "rewards": rewards,
            "after": np.where(worthless, 0.0, after),
            "ends": ends & (ends.all() | (not self.has("advantages cross deaths"))),
            "counted": (before | self.has("waiting counts")) & ~(self.returned & self.has("returns left out")),
            "absent": ~before,
        }

    @staticmethod
    def shuffled(values: Any) -> Any:
        """Return values of other steps."""
        return np.roll(values, 1, 0)

    def learn(self) -> list[Outputs]:
        found: list[Outputs] = []
        parts = self.setup.minibatches
        for epoch in range(self.setup.epochs):
            for rows in np.array_split(np.random.default_rng(epoch).permutation(self.script.num_rows), parts):
                lost = self.has("replay from zeros") or (self.has("second epoch from zeros") and epoch > 0)
                rows = rows[: self.script.num_rows // parts] if self.has("rows left out") else rows
                found.append(self.replay(rows, lost=lost or (self.has("minibatches from zeros") and parts > 1)))
                self.weights = self.weights * (1 + self.setup.learning_rate)
        if self.has("learning overwrites"):
            self.state[:] = 0.3
        return found

    def replay(self, rows: Any, *, lost: bool) -> Outputs:
        """Return the outputs for rows of the last rollout."""
        batch = {name: values[:, rows] for name, values in self.batch.items()}
        state, likely, values = np.zeros((len(rows), UNITS)) if lost else self.first[rows], [], []
        for step, (seen, starts) in enumerate(zip(batch["seen"], batch["starts"], strict=True)):
            if (step > 0 and self.has("replay through ends")) or (step == 0 and self.has("replay through first ends")):
                starts = np.zeros_like(starts)
            if step > 0 and self.has("replay through returns"):
                starts = starts & ~batch["absent"][step - 1] & ~batch["absent"][step]
            if step == 32 and self.has("short replay"):
                starts = np.ones_like(starts)
            probability, value, state = self.step(self.weights * (1 + 0.1 * self.has("noise")), seen, state, starts)
            likely.append(probability)
            values.append(value)
        for name in ("actions", "advantages"):
            batch[name] = self.shuffled(batch[name]) if self.has(f"{name} of other steps") else batch[name]
        likely, counted = np.stack(likely), batch["counted"].copy()
        counted[-1] &= not self.has("last step lost")
        log_probs = np.log(np.where(batch["actions"] == 1, likely, 1 - likely))
        parts = (batch["seen"], batch["actions"], log_probs, np.stack(values), batch["advantages"], counted)
        if self.has("padding"):
            parts = tuple(np.concatenate([part, part[-1:]]) for part in parts)
        return Outputs(*parts)

    def play(self, script: Script, steps: int) -> Outputs:
        if self.has("one batch size") and script.num_envs != self.script.num_envs:
            raise ValueError("other batch size")
        return play_steps(script, steps, self.predicting("evaluation"))

    def predicting(self, name: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        def predict(seen: Any, state: Any, starts: Any) -> tuple[Any, Any]:
            if state is None:
                kept = self.has("evaluation goes on")
                state, starts = np.zeros((len(seen), UNITS)) + self.played * kept, starts & (not kept)
            if self.has(f"{name} without memory"):
                state = np.zeros_like(state)
            if self.has(f"{name} without resets"):
                starts = np.zeros_like(starts)
            likely, _, state = self.step(self.weights, seen, state, starts)
            self.played = state[0]
            if self.has("evaluation overwrites"):
                self.state[:] = 0.3
            return (likely > 0.5).astype(int), state

        return predict

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(
                file, weights=self.acting if self.has("saves initial parameters") else self.weights, state=self.state
            )

    def load(self, path: Path) -> None:
        with np.load(path) as file:
            self.weights = file["weights"]
            if self.has("loads the state"):
                self.state, self.starts = file["state"], np.zeros_like(self.starts)
        if self.has("load goes on"):
            self.starts = np.zeros_like(self.starts)

    def export(self, path: Path) -> Play:
        np.save(path, self.weights)
        return lambda script, steps: play_steps(script, steps, self.predicting("export"))

    def close(self) -> None:
        pass
