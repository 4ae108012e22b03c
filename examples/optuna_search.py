"""Search for good options with Optuna, which stops runs whose evaluations fall behind."""

import sys
from pathlib import Path

import optuna
from rich.console import Console

from recurl.trainers import PPOConfig, RunFolder, Trainer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000


class Report:
    """Report every evaluation to a trial, and stop the run if Optuna prunes it."""

    def __init__(self, trial):
        self.trial, self.last, self.pruned = trial, float("-inf"), False

    def on_start(self, trainer):
        """Keep the trainer, to stop it later."""
        self.trainer = trainer

    def on_evaluation(self, row):
        """Report the evaluation, and stop a pruned run."""
        self.last = row["eval_return"]
        self.trial.report(self.last, int(row["env_steps"]))
        if self.trial.should_prune():
            self.pruned = True
            self.trainer.stop()


def objective(trial):
    """Train with options suggested by Optuna, and return the last evaluation."""
    rate = trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)
    cell = trial.suggest_categorical("cell", ["lstm", "gru"])
    evaluated = {"eval_every": STEPS // 4, "eval_episodes": 20}
    config = PPOConfig(
        env="recurl/TMaze-v0", cell=cell, learning_rate=rate, total_steps=STEPS, logger="none", **evaluated
    )
    folder, report = RunFolder(Path("runs/optuna") / f"trial{trial.number}"), Report(trial)
    folder.create(config, overwrite=True)
    trainer = Trainer(config, folder, console=Console(quiet=True), callbacks=[report])
    trainer.run()
    trainer.close()
    if report.pruned:
        raise optuna.TrialPruned
    return report.last


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=3 if STEPS < 10_000 else 20)
    print(f"best: {study.best_value:.3f} with {study.best_params}")
