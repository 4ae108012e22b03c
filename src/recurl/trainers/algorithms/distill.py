"""Distillation of a teacher into a recurrent student."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.seeding import GeneratorState, derive_seed
from recurl.core.specs import Composite, TensorSpec
from recurl.core.untrusted import read_json
from recurl.data import SequenceMinibatches
from recurl.envs import EnvBase
from recurl.objectives.imitation import ImitationLoss
from recurl.trainers.algorithms.configs import DistillConfig
from recurl.trainers.algorithms.environment import make_env
from recurl.trainers.algorithms.learner import Learner, Stateful
from recurl.trainers.files.checkpoints import load_newest, restoring
from recurl.trainers.networks.agent import collecting
from recurl.trainers.networks.student import LABEL, Guidance, Student, check_teacher, greedy, teacher_of
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.trust import check_names


class Distill(Learner[DistillConfig, Student]):
    """DAgger with a recurrent teacher and a recurrent student, which may see less; or behavioral cloning.

    Both walk through the same episodes, each with its own memory, and the teacher labels every step with its greedy
    action. Whose action is taken is drawn per step; the teacher's share falls to zero. The student learns the labels of
    each batch over sequences that start from its stored states.

    With ``--episodes``, the teacher is a recording: the environments play recorded episodes, whose actions are the
    labels, and the student walks through them in the same way.

    Args:
        config: the options, including the random seed.

    Sources: Ross et al., "A reduction of imitation learning and structured prediction to no-regret online learning"
    (2011), without aggregation: each batch is learned and discarded, as in Rudin et al., "RSL-RL" (2025). Pomerleau,
    "ALVINN" (1989), behavioral cloning.
    """

    reported = ("loss", "agreement", "teacher_share", "grad_norm")
    live = "loss {loss:.4f}  agreement {agreement:.3f}  teacher acts {teacher_share:.2f}"

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self._shuffle = torch.Generator().manual_seed(derive_seed(config.seed, "minibatches"))
        self.optimizer = GradientStep(
            self.agent.parameters(), learning_rate=config.learning_rate, max_norm=config.max_grad_norm
        )

    @classmethod
    def make_agent(cls, config: DistillConfig, observation_spec: Composite, action_spec: TensorSpec) -> Student:
        """Build the student; see :meth:`Learner.make_agent`."""
        seen = Composite(shape=observation_spec.shape, device=observation_spec.device)
        for key, spec in observation_spec.items():
            if key != LABEL:  # shown by recorded episodes
                seen.set(key, spec)
        return Student(config, seen, action_spec)

    def training_env(self) -> EnvBase:
        """Create the training environments, which play recorded episodes if the options name any."""
        if self.config.episodes is None:
            return super().training_env()
        from recurl.trainers.algorithms.recorded import recorded_env  # noqa: PLC0415 - imported where it is used

        return recorded_env(self.config, self.config.episodes)

    def behavior(self, env: EnvBase) -> TensorDictModuleBase:
        """Return the policy that collects: teacher, student, and the draw between them."""
        recorded = self.config.episodes is not None
        self.teacher = None if recorded else read_teacher(self.config, env).to(self.config.device)
        teacher = [] if self.teacher is None else [self.teacher]
        self.guidance = Guidance(self.config.teacher_share).to(self.config.device)
        self.loss = ImitationLoss(self.agent.actor, env.action_spec_unbatched, LABEL).to(self.config.device)
        # The loss trains no spread of real-valued actions: sampled ones would lead where the student never is.
        student = greedy(self.agent.policy) if self.loss.is_real else self.agent.policy
        return collecting(TensorDictSequential(*teacher, student, self.guidance), also=(LABEL,))

    @property
    def share(self) -> float:
        """Current fraction of the steps in which the teacher acts; recorded episodes can't be acted in."""
        config, done = self.config, self.env_steps / self.total_steps
        if config.episodes is not None:
            return 1.0
        return config.teacher_share * max(1 - done / config.teacher_fraction, 0.0) if config.teacher_fraction else 0.0

    def collect(self) -> TensorDictBase:
        """Collect a batch with the current share of the teacher; see :meth:`Learner.collect`."""
        self.guidance.share.fill_(self.share)
        return super().collect()

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Imitate the teacher's actions in a batch, in epochs over minibatches of sequences."""
        config, share = self.config, float(self.guidance.share)
        data = batch.select(*self.loss.in_keys, strict=False)
        minibatches = SequenceMinibatches(data, config.minibatches, config.sequence_length, self._shuffle)
        found: list[Tensor] = []
        for _ in range(config.epochs):
            for minibatch in minibatches.entries():
                losses = self.loss(minibatch)
                norm = self.optimizer(losses["loss"])
                found.append(torch.stack([losses["loss"].detach(), losses["agreement"], norm]))
        self.agent.observe(batch)
        loss, agreement, norm = torch.stack(found).mean(0).tolist()
        return self.report({"loss": loss, "agreement": agreement, "teacher_share": share, "grad_norm": norm})

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint, the teacher included."""
        return {
            **super().parts(),
            "teacher": self.teacher,
            "optimizer": self.optimizer,
            "shuffle": GeneratorState(self._shuffle),
        }


def read_teacher(config: DistillConfig, env: EnvBase) -> TensorDictSequential:
    """Read the teacher of a run, with its newest weights.

    Args:
        config: the student's options.
        env: the student's environments.

    Raises:
        ArgumentError: there is no such run, it can't be read, its options name code, or the environment lacks what it
            observes.
        NonFiniteError: one of its weights isn't finite.
    """
    from recurl.trainers.algorithms.table import make_agent, read_options  # noqa: PLC0415 - they know this algorithm

    folder = Path(cast(str, config.teacher))
    try:
        values = cast("dict[str, Any]", read_json(folder / "config.json"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--teacher {folder} holds no run (its config.json can't be read: {error}): name a folder that recurl "
            "train wrote."
        ) from error
    same = values.get("env") == config.env_name
    check_names({name: value for name, value in values.items() if name != "env" or not same}, folder / "config.json")
    options = read_options(values).on_cpu()
    options = options.with_env(config.env) if same else options
    path, state = load_newest(folder / "checkpoints", warnings.warn)
    with torch.random.fork_rng(devices=[]), make_env(options, 1) as its_env:
        agent = make_agent(options, its_env)
        wanted, own = its_env.action_spec_unbatched, env.action_spec_unbatched.to("cpu")
    if wanted != own:
        raise ArgumentError(
            f"The teacher {folder} acts in {wanted}, and the environment {config.env_name} takes {own}."
        )
    check_teacher(agent, env.observation_spec, len(env.batch_size), str(folder))
    with restoring(path):
        agent.load_state_dict(state["algorithm"]["agent"])
    check_finite(agent.state_dict(), f"the teacher in {path}")
    return teacher_of(agent.actor)
