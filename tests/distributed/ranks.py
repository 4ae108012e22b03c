"""Processes shared by tests: each call runs a function on some of them, in a separate process group."""

from __future__ import annotations

import itertools
import traceback
from datetime import timedelta

import torch
from torch import distributed

from tests.programs import CONTEXT

_SECONDS = 300


class Ranks:
    """Up to ``most`` processes; ``run(2, function, *arguments)`` returns the results of the function on two of them."""

    def __init__(self, most, folder):
        self._pipes, self._processes = [], []
        self._folder, self._numbers = folder, itertools.count()
        for number in range(most):
            ours, theirs = CONTEXT.Pipe()
            with theirs:
                self._processes.append(CONTEXT.Process(target=serve, args=(number, theirs)))
                self._processes[-1].start()
            self._pipes.append(ours)

    def run(self, world, function, *arguments, **options):
        store = str(self._folder / f"store{next(self._numbers)}")
        for pipe in self._pipes[:world]:
            pipe.send((world, store, function, arguments, options))
        answers = []
        for number, pipe in enumerate(self._pipes[:world]):
            assert pipe.poll(_SECONDS), f"rank {number} does not answer"
            answers.append(pipe.recv())
        errors = [error for error, _ in answers if error is not None]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def serve(rank, pipe):
    """Serve requests from a pipe."""
    torch.set_num_threads(1)
    while (work := pipe.recv()) is not None:
        world, store, function, arguments, options = work
        try:
            if world > 1:
                distributed.init_process_group(
                    "gloo",
                    store=distributed.FileStore(store, world),
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=60),
                )
                distributed.barrier()  # otherwise a rank could end while others are still connecting
            result = None, function(*arguments, **options)
        except Exception:  # noqa: BLE001 - it is raised by the test
            result = traceback.format_exc(), None
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
        pipe.send(result)
