"""TorchRL names that recurl does not provide, by package, with their replacements."""

from __future__ import annotations

__all__ = ["ABSENT", "INSTEAD"]


def _each(names: str, advice: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), advice)


_WRAPPERS = "write GymEnv(name, wrappers=[{}])"
_OWN_TRANSFORM = "write a gymnasium wrapper, GymEnv(name, wrappers=[...]), or a subclass of recurl.transforms.Transform"
_TENSORDICT_MODULE = "write tensordict.nn.TensorDictModule(module, in_keys, out_keys)"
_MLP = "write recurl.modules.MLP(in_features, out_features)"
_TORCHRL_LOSS = "TorchRL's own loss takes policies of recurl.modules.interop.for_torchrl"
_SAMPLER = "write TensorDictReplayBuffer(sampler=recurl.data.{})"
_OWN_ENV = "write GymWrapper(env) around a gymnasium environment, or a subclass of recurl.envs.EnvBase"
_GYMNASIUM = "wrap it as a gymnasium environment, for instance with shimmy, and write GymWrapper(env)"
_JAX = "write recurl.envs.JaxEnv(env) around the environment of the library"
_SIMULATOR = "write recurl.envs.VecTensorEnv(env) around an environment with rsl_rl's VecEnv protocol"
_AGENTS = "every agent is a row: write a recurl.envs.MultiAgentEnv"
_AGENTS_NETWORK = "every agent is a row of a network that all share; recurl.modules.SeparateAgents has one for each"
_MIXER = "TorchRL's own takes policies of recurl.modules.interop.for_torchrl"
_MODULE = "TorchRL's own module also works in a tensordict.nn.TensorDictSequential with modules of recurl"
_FUNCTION = "TorchRL's own function also works on the tensors of recurl's batches"
_ACTIONS = "convert actions in the environment, for instance with gymnasium.wrappers.TransformAction"
_SPEC = "write Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot or Unbounded"
_BUFFER = "write recurl.data.TensorDictReplayBuffer with a storage and a sampler of recurl.data"
_RANDOM = "leave out the policy, without which env.rollout and Collector act at random"
_LANGUAGE = "recurl has nothing for language and vision-language-action models: use TorchRL's own"

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
    **_each(
        "BatchSizeTransform ConditionalPolicySwitch ConditionalSkip DecodeVideoTransform ExpandAs "
        "FiniteTensorDictCheck Hash NextObservationDelta NextStateReconstructor PolicyAgeFilter RNDTransform "
        "RayTransform RemoveEmptySpecs SatelliteAttitudeTransform SuccessReward TerminateTransform Tokenizer "
        "UnaryTransform VIPRewardTransform",
        _OWN_TRANSFORM,
    ),
    **_each(
        "ActionChunkTransform ActionTokenizerTransform CartesianSolver DiscreteActionProjection FlattenAction "
        "HumanoidMacroAction MacroAction MacroPrimitive MacroPrimitiveTransform MultiAction RobotMacroAction "
        "RobotMacroActionMode SatelliteMacroAction TargetMacroAction URScriptPrimitive URScriptPrimitiveTransform",
        _ACTIONS,
    ),
    **_each("ModuleTransform MeanActionSelector", "put the module into the policy"),
    "MultiStepTransform": "give n_steps to recurl.objectives.DQNLoss, or lmbda to an estimator of "
    "recurl.objectives.value",
    "RunningMeanStd": "put recurl.modules.ObservationNorm first in the policy",
}

_ENV_UTILS = {
    "RandomPolicy": _RANDOM,
    **_each("MarlGroupMapType check_marl_grouping", _AGENTS),
    "make_composite_from_td": "write recurl.data.Composite with a spec for each entry",
}

_ENVS = {
    **_ENV_UTILS,
    **_each(
        "AsyncEnvPool MultiThreadedEnv MultiThreadedEnvWrapper ProcessorAsyncEnvPool ThreadingAsyncEnvPool",
        "write ParallelEnv",
    ),
    **_each(
        "AntEnv HopperEnv HumanoidEnv MujocoEnv PendulumEnv Walker2dEnv",
        'write GymEnv("Ant-v5"), or the name of another environment of gymnasium',
    ),
    **_each(
        "BraxEnv BraxWrapper JumanjiEnv JumanjiWrapper MujocoPlaygroundAgentMapping MujocoPlaygroundAgentSpec "
        "MujocoPlaygroundEnv MujocoPlaygroundWrapper",
        _JAX,
    ),
    **_each("GenesisEnv GenesisWrapper IsaacGymEnv IsaacGymWrapper IsaacLabWrapper MJLabEnv MJLabWrapper", _SIMULATOR),
    **_each(
        "CraftGroundEnv CraftGroundWrapper DMControlEnv DMControlWrapper HabitatEnv LiberoEnv LiberoWrapper MOGymEnv "
        "MOGymWrapper OpenMLEnv ProcgenEnv ProcgenWrapper RoboHiveEnv",
        _GYMNASIUM,
    ),
    **_each(
        "LBForagingEnv LBForagingWrapper MeltingpotEnv MeltingpotWrapper OpenSpielEnv OpenSpielWrapper "
        "SMACv2Env SMACv2Wrapper UnityMLAgentsEnv UnityMLAgentsWrapper",
        _AGENTS,
    ),
    "PettingZooWrapper": "write recurl.envs.PettingZooEnv",
    "VmasWrapper": "write recurl.envs.VmasEnv",
    **_each(
        "ChessEnv CubeBowlEnv DreamerEnv FinancialRegimeEnv GymLikeEnv ImaginedEnv LLMHashingEnv MicroDuckEnv "
        "MicroDuckTask MicroDuckTaskSampler ModelBasedEnvBase SatelliteEnv TicTacToeEnv ToyVLAEnv WorldModelEnv",
        _OWN_ENV,
    ),
    "DreamerDecoder": _MODULE,
    **_each("EnvMetaData get_env_metadata", "leave it out, ParallelEnv needs no description of its environments"),
    "env_creator": "write EnvCreator(create_env)",
    "get_available_libraries": "leave it out, recurl.envs imports a library where it is used",
    "make_tensordict": "write env.fake_tensordict()",
    "register_gym_spec_conversion": "convert the space with a gymnasium wrapper",
    "terminated_or_truncated": 'write tensordict["next", "done"].any()',
}

_DISTRIBUTIONS = {
    **_each("Delta TanhDelta", "a deterministic policy is a tensordict.nn.TensorDictModule that writes the action"),
    "SafeTanhTransform": "write recurl.modules.TanhNormal",
    "TruncatedNormal": "write recurl.modules.TanhNormal",
    "NormalParamWrapper": "write nn.Sequential(net, recurl.modules.NormalParamExtractor())",
}

_MODULES = {
    **_each(
        "BatchRenorm1d CEMPlanner ComposeValueTransform ConsistentDropout ConsistentDropoutModule Conv3dNet DTActor "
        "DecisionTransformer DecisionTransformerInferenceWrapper DiffusionActor DistributionalDQNnet "
        "DistributionalQValueActor DistributionalQValueHook DistributionalQValueModule DreamerActor DreamerV3BlockGRU "
        "DreamerV3BlockGRUCell DreamerV3DiscreteActor DreamerV3ImageDecoder DreamerV3ImageEncoder DreamerV3MLP "
        "DreamerV3SeededPolicy EXP3Score GPWorldModel IdentityValueTransform LeRobotPolicyWrapper MCTSScore "
        "MCTSScores MPCPlannerBase MPPIPlanner MultiStepActorWrapper ObsDecoder ObsEncoder OneHotOrdinal "
        "OnlineDTActor Ordinal PUCTScore RBFController RSSMPosterior RSSMPosteriorV3 RSSMPrior RSSMPriorV3 "
        "RSSMRollout RSSMRolloutV3 RSSMStateEstimatorV3 ReparamGradientStrategy SignedHyperbolicValueTransform "
        "Squeeze2dLayer SqueezeLayer SymExpTwoHot SymLogValueTransform TinyVLA UCB1TunedScore UCBScore VLAWrapperBase "
        "ValueTransform WorldModel WorldModelWrapper distributions_maps",
        _MODULE,
    ),
    **_each(
        "CrossCriticGroupSpec CrossGroupCritic MultiAgentConvNet MultiAgentMLP MultiAgentNetBase",
        _AGENTS_NETWORK,
    ),
    **_each("QMixer VDNMixer", _MIXER),
    **_each("LLMMaskedCategorical LMHeadActorValueOperator", _LANGUAGE),
    "QValueHook": "write recurl.modules.QValueActor",
    "RandomPolicy": _RANDOM,
    **_each(
        "RecurrentMatmulPrecision RecurrentMatmulPrecisionUserMode",
        "write recurl.modules.set_recurrent_matmul_precision(precision)",
    ),
    "VmapModule": "write torch.vmap(module)",
    "reset_noise": "explore with recurl.modules.EGreedyModule",
    "set_exploration_modules_spec_from_env": "leave it out, exploration modules take their spec when they are made",
    **_each("signed_hyperbolic signed_parabolic symexp symlog", _FUNCTION),
}

_SPECS = {
    **_each(
        "BinaryBox BoxList CategoricalBox Choice ContinuousBox DiscreteBox MultiOneHot NonTensor Stacked "
        "StackedComposite check_no_exclusive_keys "
        "consolidate_spec contains_lazy_spec",
        _SPEC,
    ),
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
    **_each(
        "CompressedListStorageCheckpointer ConditionalUpdateResult ConsumingSampler DEFAULT_DONE_KEYS Flat2TED "
        "FlatStorageCheckpointer H5Combine H5Split H5StorageCheckpointer HERReplayBuffer HindsightStrategy "
        "ImmutableDatasetWriter "
        "ListStorageCheckpointer Nested2TED NestedStorageCheckpointer OfflineToOnlineReplayBuffer RayReplayBuffer "
        "RemoteTensorDictReplayBuffer ReplayBufferEnsemble RoundRobinWriter SampleUnit SamplerEnsemble "
        "StalenessAwareSampler StorageCheckpointerBase StorageEnsemble StorageEnsembleCheckpointer "
        "StoreStorage StreamingSliceSampler TED2Flat TED2Nested TensorDictMaxValueWriter TensorDictRoundRobinWriter "
        "TensorStorageCheckpointer Trajectory TrajectoryPredicate Transition Writer WriterEnsemble "
        "filter_trajectories find_start_stop_traj iter_trajectories prefill_replay_buffer traj",
        _BUFFER,
    ),
    "PromptGroupSampler": _LANGUAGE,
    "MultiStep": "give n_steps to recurl.objectives.DQNLoss, or lmbda to an estimator of recurl.objectives.value",
}

_DATA = {
    "Sequence": _BUFFER,
    "Storage": "write recurl.data.replay_buffers.Storage",
    "DEVICE_TYPING": "write torch.device | str | int",
    **_each(
        "AdaptiveKLController ConstantKLController ContentBase DensifyReward History PairwiseDataset PromptData "
        "PromptTensorDictTokenizer RewardData RolloutFromModel TensorDictTokenizer TokenizedDatasetLoader "
        "TopKRewardSelector create_infinite_iterator get_dataloader",
        _LANGUAGE,
    ),
    **_each(
        "ActionTokenizerBase RobotDatasetMetadata UniformActionTokenizer VideoClipRef VocabTailActionTokenizer "
        "clear_video_decoder_cache set_video_decoder_cache_size validate_vla_tensordict",
        _LANGUAGE,
    ),
    **_each(
        "BinaryToDecimal HashToInt MCTSForest QueryModule RandomProjectionHash SipHash TensorDictMap TensorMap Tree",
        _FUNCTION,
    ),
}

_COLLECTORS = {
    **_each(
        "DistributedCollector DistributedDataCollector DistributedSyncCollector DistributedSyncDataCollector "
        "RPCCollector RPCDataCollector RayEvalWorker submitit_delayed_launcher",
        "write recurl.collectors.RayCollector, or one Collector in each process of torchrun",
    ),
    "split_trajectories": "leave it out: modules, losses and GAE find the boundaries in [T] and [B, T]",
    **_each("BaseCollector MultiCollector", "write Collector, MultiSyncCollector or MultiAsyncCollector"),
    "Evaluator": "write env.rollout(max_steps, policy)",
    "ProfileConfig": "write torch.profiler.profile() around the loop over the collector",
    "RandomPolicy": _RANDOM,
    **_each(
        "MultiProcessedWeightUpdater RayWeightUpdater RemoteModuleWeightUpdater VanillaWeightUpdater WeightUpdaterBase",
        "write collector.update_policy_weights_()",
    ),
    "SyncDataCollector": "write Collector",
    "MultiSyncDataCollector": "write MultiSyncCollector",
    "MultiaSyncDataCollector": "write MultiAsyncCollector",
    **_each(
        "aSyncDataCollector AsyncCollector AsyncBatchedCollector",
        "write OverlappedCollector, or MultiAsyncCollector with one environment",
    ),
}

_LOGGER = "write logging.getLogger(__name__)"

ABSENT: dict[str, dict[str, str]] = {
    "recurl": {
        **_each("logger torchrl_logger", _LOGGER),
        "timeit": "write time.perf_counter()",
        **_each(
            "get_transport_backend merge_ray_runtime_env service_backend transport_backend",
            "leave it out, recurl.collectors start what they need",
        ),
    },
    "recurl.collectors": _COLLECTORS,
    "recurl.data": {**_SPECS, **_BUFFERS, **_DATA},
    "recurl.data.replay_buffers": {**_BUFFERS, "Sequence": _BUFFER},
    "recurl.data.replay_buffers.samplers": _BUFFERS,
    "recurl.data.replay_buffers.storages": _BUFFERS,
    "recurl.envs": {
        **_TRANSFORMS,
        **_ENVS,
        **_each("set_gym_backend gym_backend", "leave it out, recurl uses gymnasium"),
        "default_info_dict_reader": "add the entries that the policy reads to the observation with a gymnasium wrapper",
    },
    "recurl.envs.libs.gym": _each("set_gym_backend gym_backend", "leave it out, recurl uses gymnasium"),
    "recurl.envs.transforms": _TRANSFORMS,
    "recurl.envs.utils": {**_ENV_UTILS, **_each("StepMDP _StepMDP", "write step_mdp(tensordict)")},
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
        **_each(
            "PercentileValueNorm PopArtValueNorm RunningValueNorm ValueNorm",
            "scale rewards with recurl.modules.RewardScaler",
        ),
        **_MODULES,
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
        **_each(
            "DreamerActorLoss DreamerModelLoss DreamerV3ActorLoss DreamerV3Loss DreamerV3ModelLoss "
            "DreamerV3ValueLoss DreamerValueLoss ExponentialQuadraticCost WorldModelLoss",
            _TORCHRL_LOSS,
        ),
        "IPPOLoss": "every agent is a row of recurl.envs.MultiAgentEnv: write ClipPPOLoss",
        "MAPPOLoss": 'every agent is a row of recurl.envs.MultiAgentEnv: write ClipPPOLoss with a critic of "state"',
        "QMixerLoss": _MIXER,
        "AUTO_LOSS_MASK_KEYS": 'leave it out, losses of recurl read ("collector", "mask")',
        "KLAdaptiveLR": 'write PPOConfig(learning_rate_schedule="adaptive") in recurl.trainers',
        **_each("hold_out_net hold_out_params", "write torch.no_grad(), or detach the module's output"),
        "default_value_kwargs": "write loss.make_value_estimator(gamma=..., lmbda=...)",
        "next_state_value": "write an estimator of recurl.objectives.value",
        "group_optimizers": "write one optimizer of several parameter groups",
        **_each(
            "add_random_module categorical_kl_balanced categorical_kl_terms distance_loss symexp symlog "
            "two_hot_cross_entropy two_hot_decode two_hot_encode",
            _FUNCTION,
        ),
        "TargetNetUpdater": "write SoftUpdate or HardUpdate",
    },
    "recurl.objectives.value": {
        **_each(
            "TD0Estimate TD1Estimate TDLambdaEstimate ValueEstimatorBase",
            "write TD0Estimator, TD1Estimator, TDLambdaEstimator",
        ),
        "MultiAgentGAE": "every agent is a row of recurl.envs.MultiAgentEnv: write GAE",
    },
    "recurl.trainers": {
        "RewardNormalizer": "scale rewards with recurl.modules.RewardScaler",
        **_each(
            "BatchSubSampler ClearCudaCache CountFramesLog DefaultOptimizationStepper EarlyStopping LRSchedulerHook "
            "LogScalar LogTiming LogValidationReward MixedPrecisionOptimizationStepper OptimizationStepper "
            "OptimizerHook ReplayBufferTrainer SelectKeys TargetNetUpdaterHook TrainerHookBase UTDRHook UpdateWeights "
            "ValueEstimatorHook mask_batch",
            "the trainers of recurl have no hooks: their options are those of recurl.trainers.PPOConfig and its like",
        ),
    },
    "recurl.transforms": _TRANSFORMS,
}
"""Replacements by name, for each module whose ``__getattr__`` raises."""

INSTEAD = {
    "recurl._utils": f"{_LOGGER} for its logger, and time.perf_counter() for timeit",
    "recurl.checkpoint": "recurl train saves and resumes by itself; in a loop of your own, write torch.save of the "
    "state_dict() of the loss, the optimizer and the recurl.Collector",
    "recurl.data.datasets": "TorchRL's own datasets give TensorDicts, which recurl.data.TensorDictReplayBuffer takes",
    "recurl.modules.inference_server": "write recurl.load(run), whose policy steps batches of observations",
    "recurl.record": "recurl train logs by itself, recurl play --video FILE.mp4 records; in a loop of your own, "
    "TorchRL's own loggers work too, and gymnasium.wrappers.RecordVideo",
    "recurl.render": "write recurl play --video FILE.mp4, or gymnasium.wrappers.RecordVideo",
    "recurl.services": "leave it out, recurl.collectors start what they need",
    "recurl.testing": "write recurl.envs.check_env_specs, or recurl doctor",
    "recurl.weight_update": "write update_policy_weights_() of recurl.Collector",
    **_each(
        "recurl.collectors.llm recurl.data.llm recurl.data.vla recurl.envs.llm recurl.modules.llm recurl.modules.vla "
        "recurl.objectives.llm",
        _LANGUAGE,
    ),
}
"""What to write instead of modules."""
