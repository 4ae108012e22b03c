import json

import pytest

from recurl.core.errors import ArgumentError
from recurl.trainers import A2CConfig, ImpalaConfig, PPOConfig

ENV = "recurl/RepeatPrevious-v0"
GRAPH = {"cuda_graph": True, "device": "cuda"}


def test_survives_json():
    config = PPOConfig(env=ENV, env_kwargs=("k=1", "episode_length=8"), cell="gru", stop_return=0.5)
    assert PPOConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_env_arguments_are_literals_or_text():
    config = PPOConfig(env=ENV, env_kwargs=("k=1", "mode=human", "size=(2, 3)", "on=False"))
    assert config.env_arguments == {"k": 1, "mode": "human", "size": (2, 3), "on": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "--num-envs must be positive, got 0"),
        ({"hidden_size": -1}, "--hidden-size must be positive, got -1"),
        ({"sequence_length": 0}, "--sequence-length must be positive"),
        ({"seed": -1}, "--seed must not be negative"),
        ({"gamma": 1.5}, "--gamma must lie between 0 and 1"),
        ({"backend": "fastst"}, r"--backend must be one of .*, got 'fastst'\. Did you mean fastest\?"),
        ({"cell": "gruu"}, r"--cell: There is no cell 'gruu'\. Did you mean gru\?.*Use none"),
        ({"cell": "gtrxl(window=0)"}, r"^--cell: window must be at least 1, got 0\.$"),
        ({"clip_epsilon": 1.0}, "--clip-epsilon must lie between 0 and 1, both excluded, got 1"),
        ({"env_kwargs": ("k",)}, "--env-kwargs takes name=value, such as k=8, got 'k'"),
        ({"minibatches": 64}, "--minibatches must not exceed the 32 sequences"),
        ({"total_steps": 1000}, "--total-steps must cover one batch of 1024 steps"),
        ({"overlap": True, "device": "cuda"}, "--overlap on a GPU .* needs --env-workers, .* got 0 workers"),
        (
            {**GRAPH, "overlap": True, "env_workers": 2},
            "--cuda-graph needs batches that aren't collected in a second thread, got --overlap",
        ),
        ({"env_groups": 2}, "--env-groups 2 needs --env-workers, .* got 0 workers and 8 environments"),
        ({"env_groups": 3, "env_workers": 4}, "multiple of groups x workers, got 4 workers and 8 environments"),
        ({"compile": True, "backend": "loop"}, "--compile needs a built-in cell and .* got lstm and loop"),
        (
            {"compile": True, "cell": "examples.mingru:MinGRU"},
            "--compile needs a built-in cell .* got examples.mingru:MinGRU",
        ),
        ({"cuda_graph": True}, "--cuda-graph needs --device cuda, got cpu"),
        ({**GRAPH, "backend": "pad"}, "--cuda-graph needs --backend fastest or triton.* got pad"),
        ({**GRAPH, "sequence_length": 48}, "minibatches of equal size: .* got 48 for 128, and 4"),
        ({**GRAPH, "minibatches": 5}, "--minibatches the 32 sequences of a batch; got 32 for 128, and 5"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ArgumentError, match=message):
        PPOConfig(env=ENV, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": ENV, "colour": 1}, "Unknown options"),
        ({}, "can't be read"),
        ({"env": ENV, "seed": "x"}, "--seed must be a whole number, got 'x'"),
        ({"env": ENV, "num_envs": 8.0}, "--num-envs must be a whole number, got 8.0"),
        ({"env": ENV, "cuda_graph": 1}, "--cuda-graph must be true or false, got 1"),
        ({"env": ENV, "gamma": None}, "--gamma must be a number, got None"),
        ({"env": 3}, "--env must be text in UTF-8, got 3"),
        ({"env": ENV, "device": "\ud800"}, "--device must be text in UTF-8, got '.ud800'"),
        ({"env": ENV, "env_kwargs": 3}, "--env-kwargs must be a tuple, got 3"),
        ({"env": ENV, "env_kwargs": ["k=1", 3]}, "--env-kwargs must be text in UTF-8, got 3"),
    ],
)
def test_dicts_that_cannot_be_read(values, message):
    with pytest.raises(ArgumentError, match=message):
        PPOConfig.from_dict(values)


@pytest.mark.parametrize("kind", [A2CConfig, ImpalaConfig])
def test_options_of_other_algorithms_of_its_kind(kind):
    assert kind(env=ENV, **GRAPH, rollout_steps=17).on_cpu().cuda_graph is False
    with pytest.raises(ArgumentError, match="--cuda-graph needs --device cuda, got cpu"):
        kind(env=ENV, cuda_graph=True)
    with pytest.raises(ArgumentError, match=r"--cuda-graph needs --backend fastest or triton.* got pad"):
        kind(env=ENV, **GRAPH, backend="pad")


def test_a_backend_of_another_device_is_refused_before_a_run_begins():
    words = "--backend {} needs --device {}, got {}: use that device, or --backend fastest"
    with pytest.raises(ArgumentError, match=words.format("triton", "cuda", "cpu")):
        PPOConfig(env=ENV, backend="triton", device="cpu")
    with pytest.raises(ArgumentError, match=words.format("cpu", "cpu", "cuda:1")):
        PPOConfig(env=ENV, backend="cpu", device="cuda:1", cuda_graph=False)
    assert PPOConfig(env=ENV, backend="triton", device="cpu", cell="none").backend == "triton"
    assert PPOConfig(env=ENV, backend="triton", device="cuda").on_cpu().backend == "fastest"


def test_options_of_impala():
    assert ImpalaConfig(env=ENV, overlap=True).on_cpu().overlap is False
    with pytest.raises(ArgumentError, match=r"--overlap on a GPU .* needs --env-workers"):
        ImpalaConfig(env=ENV, overlap=True, device="cuda")
    with pytest.raises(ArgumentError, match="--rho-thresh must be positive, got 0"):
        ImpalaConfig(env=ENV, rho_thresh=0.0)
    with pytest.raises(ArgumentError, match="--clip-epsilon must lie between 0 and 1, both excluded, got 1"):
        ImpalaConfig(env=ENV, clip_epsilon=1.0)


def test_cuda_graphs_fit_equal_minibatches():
    assert PPOConfig(env=ENV, **GRAPH).cuda_graph
    assert PPOConfig(env=ENV, **GRAPH, cell="none", backend="pad").cuda_graph


def test_counts():
    config = PPOConfig(env=ENV, num_envs=4, rollout_steps=16, total_steps=200)
    assert (config.frames_per_batch, config.updates) == (64, 3)
