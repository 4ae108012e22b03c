"""Processes that tests share: each call runs a function on some of them, in a process group of its own."""

from __future__ import annotations

import itertools
import traceback
from datetime import timedelta

import torch
import torch.multiprocessing as mp
from torch import distributed

_SECONDS = 100


class Ranks:
    """Up to ``most`` processes; ``run(2, function, *arguments)`` returns what the function returns on each of two."""

    def __init__(self, most, folder):
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        self._folder, self._numbers = folder, itertools.count()
        for number in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, number), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

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
            process.kill()


def _serve(pipe, rank):
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
                distributed.barrier()  # a rank that ends at once would end while others still connect
            result = None, function(*arguments, **options)
        except Exception:  # noqa: BLE001 - it is raised by the test
            result = traceback.format_exc(), None
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
        pipe.send(result)
