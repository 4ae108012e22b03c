"""TorchRL names that recurl does not provide, by package, with their replacements."""

from __future__ import annotations

__all__ = ["ABSENT"]


def _each(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


_WRAPPERS = "write GymEnv(name, wrappers=[{}])"
_OWN_TRANSFORM = "write a gymnasium wrapper, GymEnv(name, wrappers=[...]), or a subclass of recurl.transforms.Transform"
_TENSORDICT_MODULE = "write tensordict.nn.TensorDictModule(module, in_keys, out_keys)"
_MLP = "write recurl.modules.MLP(in_features, out_features)"
_TORCHRL_LOSS = "TorchRL's own loss takes policies of recurl.modules.interop.for_torchrl"
_SAMPLER = "write TensorDictReplayBuffer(sampler=recurl.data.{})"

_TRANSFORMS = {
    "GrayScale": _WRAPPERS.format("gymnasium.wrappers.GrayscaleObservation"),
    "Resize": _WRAPPERS.format("lambda env: gymnasium.wrappers.ResizeObservation(env, (84, 84))"),
    "ToTensorImage": "images stay uint8 tensors, which recurl.modules.ImageEncoder scales (any layout)",
    "CatFrames": "a recurrent policy needs no frame stack; for one "
    + _WRAPPERS.format("gymnasium.wrappers.FrameStackObservation"),
    "CatTensors": _WRAPPERS.format("gymnasium.wrappers.FlattenObservation")
    + ", or a module with several in_keys, which concatenates them",
    "DoubleToFloat": "leave it out, GymEnv converts float64 observations to float32",
    "ObservationNorm": "put recurl.modules.ObservationNorm first in the policy",
    "RewardScaling": "scale rewards of batches with recurl.modules.RewardScaler, or "
    + _WRAPPERS.format("lambda env: gymnasium.wrappers.TransformReward(env, scale)"),
    "RewardClipping": _WRAPPERS.format("lambda env: gymnasium.wrappers.ClipReward(env, -1, 1)"),
    **_each(
        "VecNorm VecNormV2",
        "put recurl.modules.ObservationNorm first in the policy, and scale rewards with recurl.modules.RewardScaler",
    ),
    **_each(
        "NoopResetEnv FrameSkipTransform EndOfLifeTransform TimeMaxPool",
        _WRAPPERS.format("gymnasium.wrappers.AtariPreprocessing"),
    ),
    **_each(
        "DTypeCastTransform DeviceCastTransform PinMemoryTransform", "leave it out, or use GymEnv(name, device=...)"
    ),
    "ActionMask": "leave it out, GymEnv reads masks from the observation or from info (action_mask=)",
    "BurnInTransform": "write recurl.data.BurnIn(policy, steps)",
    **_each("AutoResetEnv AutoResetTransform VecGymEnvTransform", "leave it out, GymEnv has no autoreset steps"),
    "RandomCropTensorDict": "write recurl.data.SliceSampler(slice_len=...)",
    "TrajCounter": 'leave it out, batches have ("collector", "traj_ids")',
    **_each(
        "ActionDiscretizer ActionScaling BinarizeReward CenterCrop ClipTransform Crop ExcludeTransform "
        "FlattenObservation LineariseRewards ObservationTransform PermuteTransform R3MTransform "
        "RandomTruncationTransform RenameTransform Reward2GoTransform SelectTransform SignTransform SqueezeTransform "
        "Stack TargetReturn Timer UnsqueezeTransform VC1Transform VIPTransform gSDENoise",
        _OWN_TRANSFORM,
    ),
}

_DISTRIBUTIONS = {
    **_each("Delta TanhDelta", "a deterministic policy is a tensordict.nn.TensorDictModule that writes the action"),
    "TruncatedNormal": "write recurl.modules.TanhNormal",
    "NormalParamWrapper": "write nn.Sequential(net, recurl.modules.NormalParamExtractor())",
}

_SPECS = {
    "CompositeSpec": "write recurl.data.Composite",
    **_each(
        "UnboundedContinuous UnboundedDiscrete UnboundedContinuousTensorSpec UnboundedDiscreteTensorSpec",
        "write recurl.data.Unbounded",
    ),
    **_each("BoundedContinuous BoundedTensorSpec", "write recurl.data.Bounded"),
    "OneHotDiscreteTensorSpec": "write recurl.data.OneHot",
    "DiscreteTensorSpec": "write recurl.data.Categorical",
    "MultiDiscreteTensorSpec": "write recurl.data.MultiCategorical",
    "BinaryDiscreteTensorSpec": "write recurl.data.Binary",
}

_BUFFERS = {
    **_each(
        "PrioritizedReplayBuffer TensorDictPrioritizedReplayBuffer",
        _SAMPLER.format("PrioritizedSampler(max_capacity, alpha, beta)"),
    ),
    "SliceSamplerWithoutReplacement": "write SliceSampler(replacement=False), or for epochs over a batch "
    "recurl.data.SequenceMinibatches",
    **_each("TensorStorage LazyStackStorage CompressedListStorage", "write recurl.data.LazyTensorStorage(max_size)"),
    "MultiStep": "give n_steps to recurl.objectives.DQNLoss, or lmbda to an estimator of recurl.objectives.value",
}

_COLLECTORS = {
    "SyncDataCollector": "write Collector",
    "MultiSyncDataCollector": "write MultiSyncCollector",
    "MultiaSyncDataCollector": "write MultiAsyncCollector",
    **_each(
        "aSyncDataCollector AsyncCollector", "write OverlappedCollector, or MultiAsyncCollector with one environment"
    ),
}

ABSENT: dict[str, dict[str, str]] = {
    "recurl.collectors": _COLLECTORS,
    "recurl.data": {**_SPECS, **_BUFFERS},
    "recurl.data.replay_buffers": _BUFFERS,
    "recurl.data.replay_buffers.samplers": _BUFFERS,
    "recurl.data.replay_buffers.storages": _BUFFERS,
    "recurl.envs": {
        **_TRANSFORMS,
        **_each("set_gym_backend gym_backend", "leave it out, recurl uses gymnasium"),
        "default_info_dict_reader": "add the entries that the policy reads to the observation with a gymnasium wrapper",
        **_each(
            "BraxEnv DMControlEnv HabitatEnv JumanjiEnv ProcgenEnv",
            "wrap it as a gymnasium environment, for instance with shimmy, and write GymWrapper(env)",
        ),
        "MultiThreadedEnv": "write ParallelEnv",
    },
    "recurl.envs.libs.gym": _each("set_gym_backend gym_backend", "leave it out, recurl uses gymnasium"),
    "recurl.envs.transforms": _TRANSFORMS,
    "recurl.envs.utils": _each("StepMDP _StepMDP", "write step_mdp(tensordict)"),
    "recurl.modules": {
        **_DISTRIBUTIONS,
        "ConvNet": "write recurl.modules.ImageEncoder(shape, width=...), or nn.Sequential with nn.Conv2d",
        "Actor": _TENSORDICT_MODULE + ', with out_keys=["action"]',
        "SafeModule": _TENSORDICT_MODULE,
        "SafeSequential": "write tensordict.nn.TensorDictSequential(...)",
        **_each(
            "SafeProbabilisticModule SafeProbabilisticTensorDictSequential", "write recurl.modules.ProbabilisticActor"
        ),
        "TanhModule": "write tensordict.nn.TensorDictModule(nn.Tanh(), [key], [key]) for actions in [-1, 1]",
        **_each("ActorCriticOperator ActorCriticWrapper", "write recurl.modules.ActorValueOperator"),
        "EGreedyWrapper": "write recurl.modules.EGreedyModule after the policy",
        **_each(
            "AdditiveGaussianWrapper OrnsteinUhlenbeckProcessModule OrnsteinUhlenbeckProcessWrapper",
            "write recurl.modules.AdditiveGaussianModule after the policy",
        ),
        **_each("NoisyLinear NoisyLazyLinear", "explore with recurl.modules.EGreedyModule"),
        **_each("DuelingCnnDQNet DdpgCnnActor DdpgCnnQNet", "write nn.Sequential with recurl.modules.ImageEncoder"),
        **_each("DdpgMlpActor DdpgMlpQNet", _MLP),
        **_each("ValueNorm PopArtValueNorm RunningValueNorm", "scale rewards with recurl.modules.RewardScaler"),
    },
    "recurl.modules.distributions": _DISTRIBUTIONS,
    "recurl.objectives": {
        **_each("PPOLoss KLPENPPOLoss", "write ClipPPOLoss; " + _TORCHRL_LOSS),
        "DDPGLoss": "write TD3Loss; " + _TORCHRL_LOSS,
        **_each(
            "ACTLoss BCLoss CQLLoss CrossQLoss DTLoss DiffusionBCLoss DiscreteCQLLoss DiscreteIQLLoss "
            "DistributionalDQNLoss GAILLoss IQLLoss OnlineDTLoss REDQLoss RNDLoss TD3BCLoss TQCLoss",
            _TORCHRL_LOSS,
        ),
        "TargetNetUpdater": "write SoftUpdate or HardUpdate",
    },
    "recurl.objectives.value": _each(
        "TD0Estimate TD1Estimate TDLambdaEstimate ValueEstimatorBase",
        "write TD0Estimator, TD1Estimator, TDLambdaEstimator",
    ),
    "recurl.transforms": _TRANSFORMS,
}
"""Replacements by name, for each module whose ``__getattr__`` raises."""
