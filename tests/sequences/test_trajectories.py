"""Trajectories of the rows: saved on one device, restored on another."""

import torch

from recurl.sequences.trajectories import Trajectories


def test_a_state_is_restored_on_the_device_of_the_rows():
    saved = Trajectories(torch.Size([2]), None)
    saved.advance(torch.tensor([[False, True, False], [False, False, False]]))
    state = saved.state_dict()
    elsewhere = Trajectories(torch.Size([2]), torch.device("meta"))
    elsewhere.load_state_dict(state)
    ids, steps = elsewhere.advance(torch.zeros(2, 3, dtype=torch.bool, device="meta"))
    assert ids.device.type == steps.device.type == "meta"
    again = Trajectories(torch.Size([2]), None)
    again.load_state_dict(state)
    again.start_new_rows(torch.tensor([True, True]))
    assert again.ids.tolist() != state["traj_ids"].tolist()
    assert state["traj_ids"].tolist() == saved.ids.tolist()  # the state isn't changed
