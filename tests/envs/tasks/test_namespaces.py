"""Array namespaces: what tensors do in programs."""

import torch

from recurl._torch import compiling, traced_graph
from recurl.envs.tasks.namespaces import tensors_on


def test_programs_sort_by_torchs_own_kernel():
    xp = tensors_on("cpu")
    keys = torch.rand(52, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def order(x):
        return xp.argsort(x, axis=0), xp.argsort(x.T)

    with compiling():
        program = traced_graph(order, [keys])
    assert [str(node.target) for node in program.graph.nodes].count("recurl.argsort.default") == 2
    for found, expected in zip(program(keys), order(keys), strict=True):
        assert torch.equal(found, expected)
        assert found.is_contiguous()
    torch.library.opcheck(torch.ops.recurl.argsort.default, (keys.T, 0))
