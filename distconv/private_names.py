"""The private names of torch that distconv uses; mucudnn has a table of its own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import mucudnn.private_names
from mucudnn.lazily import uncollected
from mucudnn.private_names import MissingName, Name, needed_by

__all__ = ["NAMES", "MissingName", "check", "lacks", "require"]

CHECKPOINTS = "torch.utils.checkpoint in a distributed model"
COMPILED = "torch.compile of a distributed model"
DDP = "DistributedDataParallel._set_static_graph"
DEFERRED = "masks of which a rank makes its part"
DIFFERENCES = "the names of what differs between ranks"
ENDED_JOBS = "process groups that go with their job"
FULLY_SHARDED = "--shard-parameters"
FOLLOWED = "following a model without its numbers"
HOOKED = "gradients taken in less time"
IN_PLACE = "a change of a distributed tensor's dims in place"
IN_TURN = "computing in turn"
LAYERS = "layers called in less time"
LOADING = "a DataLoader on ranks"
NEW_TENSORS = "new tensors in the layout of what is written to them"
OLD_HOOKS = "Module.register_backward_hook in a distributed model"
PRINTED = "the text of a distributed tensor as wide as torch's"
READING = "--shard-data"
RESHAPED = "parameters in shards, and other shapes of them"
SCRIPTED = "torch.jit.script of functions that make tensors"
SCRIPTED_CALLS = "scripted functions of distributed tensors"
SHUTDOWN = "distconv.shutdown"
STRANGERS = "a program's own DTensors beside a distributed model"
TRANSFORMS = "torch.func over distributed models"
UNRULED = "operators without a rule"
UNWRITTEN = "zeros for memory that a script does not write"

_BACKWARD = "whether this is a backward, of which step, and what it belongs to in forward"
_CLONES = "of common subexpressions, collectives are kept on every rank"
_RECORDED = "whether autograd records the first use of a parameter in a compiled graph"
_TRANSFORMS = "within torch.func, and with dual numbers, models run whole"
_WHOLE = "DTensor's own dispatch, for operators without a rule here"
_TREES = "the tensors within nested arguments and results"
_MODULE = "what is in a module, by name"
_FAKE = "whether a tensor has numbers"
_UNNUMBERED = "tensors without numbers, made in less time"
_PARTS = "parts in turn are ranks in threads"
_READING = "a rank reads its part of what a Dataset gives"
_BATCHES = "the indices of the next batch, in the order of one process"

NAMES = (
    Name("torch.Tensor._base", "what a tensor is a view of"),
    Name("torch.Tensor._version", "whether a tensor was changed in place since"),
    Name("torch._C.DisableTorchFunctionSubclass", "a subclass of tensors as the plain tensor in it"),
    Name("torch._C.DispatchKey", "the keys at which a rule is registered"),
    Name("torch._C._AutoDispatchBelowAutograd", "products and compiled graphs are computed beneath autograd"),
    Name("torch._C._are_functorch_transforms_active", "not within torch.func, which activations cannot pass"),
    Name("torch._C._autograd._get_sequence_nr", _BACKWARD),
    Name("torch._C._current_autograd_node", _BACKWARD),
    Name("torch._C._current_graph_task_id", _BACKWARD),
    Name("torch._C._dispatch_get_all_op_names", "which operators there are"),
    Name("torch._C._dispatch_get_registrations_for_dispatch_key", "which operators are made of others"),
    Name("torch._C._jit_get_all_schemas", "which operators there are"),
    Name("torch._C._select_conv_backend", "which kernel torch would take for a convolution"),
    Name("torch._ops.OpOverload._schema", "an operator's name and arguments"),
    Name("torch.autograd.Function._backward_cls", "which function a node of autograd's graph belongs to"),
    Name("torch.autograd.grad_mode._unsafe_preserve_version_counter", "running statistics that were read may change"),
    Name("torch.autograd.graph.Node._sequence_nr", _BACKWARD),
    Name("torch.distributed.tensor.DTensor._local_tensor", "the shard of this rank"),
    Name("torch.distributed.tensor.DTensor._op_dispatcher", _WHOLE),
    Name("torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication", "plain tensors are replicated"),
    Name("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", _WHOLE),
    Name("torch.distributed.tensor.DTensor._spec", "a tensor's layout on its mesh"),
    Name("torch.distributed.tensor._dtensor_spec.DTensorSpec", "a tensor's layout on its mesh"),
    Name("torch.distributed.tensor._dtensor_spec.TensorMeta", "shape, strides and type of the whole tensor"),
    Name("torch.nn.Module._buffers", _MODULE),
    Name("torch.nn.Module._call_impl", "a call of a module, within which a run begins and ends"),
    Name("torch.nn.Module._modules", _MODULE),
    Name("torch.nn.Module._parameters", _MODULE),
    Name("torch.utils._python_dispatch._disable_current_modes", "plans are made of numbers, also within a trace"),
    Name("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "whether a model's operators are counted"),
    Name("torch.utils._pytree.tree_leaves", _TREES),
    Name("torch.utils._pytree.tree_map", _TREES),
    Name("torch.utils._pytree.tree_map_only", _TREES),
    *needed_by(
        (COMPILED,),
        Name("torch._compile._disable_dynamo", "a call that torch.compile leaves alone"),
        Name("torch._functionalize_has_data_mutation", "whether a graph has changed a parameter"),
        Name("torch._dispatch.python.no_python_dispatcher", "ranks that make a graph may call collectives"),
        Name("torch._C._dynamo.eval_frame._FrameAction", "functions of ours that no graph begins in"),
        Name("torch._C._dynamo.eval_frame._FrameExecStrategy", "functions of ours that no graph begins in"),
        Name("torch._dynamo.types.ConvertFrameReturn", "functions of ours that no graph begins in"),
        Name("torch._dynamo.compiled_autograd._enable", "no backward is traced as a whole"),
        Name("torch._dynamo.convert_frame.CatchErrorsWrapper", "in which thread a model is traced"),
        Name("torch._dynamo.convert_frame.compile_lock", "one thread traces at a time"),
        Name("torch._dynamo.eval_frame.innermost_backend", "the compiler that the program asked for"),
        Name("torch._dynamo.exc.FailOnRecompileLimitHit", "a model that cannot be compiled runs without"),
        Name("torch._dynamo.exc.TorchDynamoException", "a model that cannot be compiled runs without"),
        Name("torch._dynamo.guards.check_dtensor_spec", "a graph is for inputs of one whole shape, as on all ranks"),
        Name("torch._dynamo.guards.extract_dtensor_spec", "a graph remembers its inputs' mesh itself, no copy of it"),
        Name("torch._dynamo.variables.nn_module", "that our call of a module is traced as torch's own"),
        Name("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache", "each rank has its own graph"),
        Name(
            "torch._functorch._aot_autograd.graph_compile.compute_inner_mutated_inp_indices_from_subclass_meta",
            "what forward saves follows the inputs that it changes",
        ),
        Name("torch._functorch.aot_autograd.aot_stage2_compile", "a compiled graph is called beneath autograd"),
        Name("torch._functorch.compile_utils.rand_ops", _CLONES),
        Name("torch._functorch.config.patch", "gradients of inputs that a graph changes are distributed"),
        Name("torch._functorch.partitioners._must_be_in_forward", _CLONES),
        Name("torch._functorch.partitioners.force_save_collectives", "collectives whose result is not read are kept"),
        Name("torch._functorch.partitioners.is_not_collective", "collectives whose result is not read are kept"),
        Name("torch._guards.TracingContext", "what a compiler knows of a tensor's memory"),
        Name("torch._inductor.dependencies.StarDep", "a read stays behind the wait for a collective"),
        Name("torch._inductor.dependencies.WeakDep", "a read stays behind the wait for a collective"),
        Name("torch._inductor.scheduler.SchedulerNode.recompute_size_and_body", "a read follows the wait"),
        Name("torch._ops.OpOverload._uncache_dispatch", "an operator that ran before its rule was there"),
        Name("torch._subclasses.functional_tensor.FunctionalTensor", _FAKE),
        Name("torch.distributed.tensor.DTensor._stable_hash_for_caching", "a graph of its own", since="2.13"),
        Name("torch.nn.Module._compiled_call_impl", "whether a module is compiled"),
        Name("torch._C._set_grad_enabled", _RECORDED),
        Name("torch.autograd.grad_mode._enter_inference_mode", _RECORDED),
        Name("torch.autograd.grad_mode._exit_inference_mode", _RECORDED),
    ),
    *needed_by(
        (COMPILED, FOLLOWED, IN_TURN, RESHAPED),
        Name("torch.UntypedStorage._cdata", "whether two tensors share their memory"),
        Name("torch._subclasses.fake_tensor.FakeTensor", _FAKE),
    ),
    *needed_by(
        (FOLLOWED,),
        Name("torch.Tensor._make_subclass", _UNNUMBERED),
        Name("torch._C._dispatch_has_kernel_for_dispatch_key", "which operators always give views"),
        Name("torch._C._set_throw_on_mutable_data_ptr", _UNNUMBERED),
        Name("torch._subclasses.fake_tensor.in_kernel_invocation_manager", _UNNUMBERED),
        Name("torch._subclasses.fake_tensor.DataDependentOutputException", "the operators that need numbers"),
        Name("torch._subclasses.fake_tensor.DynamicOutputShapeException", "the operators whose shape needs numbers"),
        Name("torch._subclasses.fake_tensor.FakeTensorMode", "a model is followed without numbers"),
        Name("torch._subclasses.fake_tensor.unset_fake_temporarily", "numbers that are there all the same"),
        Name("torch.distributed._tools.fake_collectives.CollectiveOp", "the bytes of a collective"),
        Name("torch.distributed._tools.fake_collectives.collective_ops", "which operators are collectives"),
        Name("torch.distributed._tools.fake_collectives.sync_ops", "which operators wait for collectives"),
        Name("torch.distributed.tensor._sharding_prop.ShardingPropagator", _WHOLE),
        Name(
            "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
            "whole tensors whose shapes alone are wanted take no memory",
        ),
        Name("torch.testing._internal.distributed.fake_pg.FakeStore", "a group of ranks that are not there"),
        Name("torch.utils._pytree.tree_flatten", _TREES),
        Name("torch.utils._pytree.tree_unflatten", _TREES),
    ),
    *needed_by((FOLLOWED, IN_TURN), Name("torch.utils._python_dispatch.TorchDispatchMode", "a step's operators")),
    *needed_by(
        (IN_TURN,),
        Name("torch.distributed._functional_collectives.AsyncCollectiveTensor", "it has no memory that could leave"),
        Name("torch._C.DisableTorchFunction", "what parts exchange is none of what they see of a program"),
        Name("torch._C._autograd._get_current_graph_task_keep_graph", "retain_graph=True applies to parts"),
        Name("torch._C._autograd._unsafe_set_version_counter", "each part counts its own changes of a parameter"),
        Name("torch._C._cuda_clearCublasWorkspaces", "parts in turn share one workspace of cuBLAS", cuda=True),
        Name("torch._C._distributed_c10d._register_process_group", _PARTS),
        Name("torch._C._distributed_c10d._resolve_process_group", _PARTS),
        Name("torch._utils._take_tensors", "gradients that ranks add up by one message"),
        Name("torch.distributed.device_mesh.DeviceMesh._thread_id", _PARTS),
        Name("torch.distributed.distributed_c10d._process_group_name", _PARTS),
        Name("torch.distributed.distributed_c10d._world", _PARTS),
        Name("torch.nn.attention._cur_sdpa_kernel_backends", "backward computes attention as forward did"),
        Name("torch.overrides._get_current_function_mode_stack", "what sees that a part writes, which backward leaves"),
        Name("torch.nn.utils.parametrize._cache", "what parametrizations gave within a part"),
        Name("torch.nn.utils.parametrize._cache_enabled", "whether a part keeps what parametrizations give"),
    ),
    *needed_by(
        (TRANSFORMS,),
        Name("torch._C._functorch.is_functorch_wrapped_tensor", "such a tensor has no numbers to compare"),
        Name("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _TRANSFORMS),
        Name("torch.autograd.forward_ad._current_level", _TRANSFORMS),
        Name("torch.fx._symbolic_trace._orig_module_call", _TRANSFORMS),
    ),
    *needed_by(
        (CHECKPOINTS,),
        Name("torch.utils.checkpoint._CachedTorchDispatchMode", "what a selective checkpoint has saved"),
        Name("torch.utils.checkpoint._CachingTorchDispatchMode", "what a selective checkpoint saves"),
        Name("torch.utils.checkpoint._CheckpointFrame", "what a checkpoint computes again"),
        Name("torch.utils.checkpoint._CheckpointFrame.save_inputs", "activations in checkpoints", since="2.13"),
        Name("torch.utils.checkpoint._StopRecomputationError", "what a checkpoint computes again ends early"),
        Name("torch.utils.checkpoint._checkpoint_hook", "within a checkpoint every layer fetches its own halo"),
    ),
    *needed_by(
        (READING,),
        Name("torch._C._nn._parse_to", "what Tensor.to is asked for"),
        Name("torch.utils.data.DataLoader._auto_collation", "whether a loader makes batches"),
        Name("torch.utils.data.DataLoader._index_sampler", _BATCHES),
        Name("torch.utils.data._utils.collate.collate", _READING),
        Name("torch.utils.data._utils.collate.default_collate_fn_map", _READING),
        Name("torch.utils.data._utils.fetch._MapDatasetFetcher", _READING),
        Name("torch.utils.data.dataloader._BaseDataLoaderIter._index_sampler", _BATCHES),
    ),
    *needed_by(
        (LOADING, READING),
        Name("torch.utils.data.dataloader._BaseDataLoaderIter", _BATCHES),
        Name("torch.utils.data.dataloader._BaseDataLoaderIter._num_workers", "whether this process reads by itself"),
    ),
    *needed_by(
        (SCRIPTED,),
        Name("torch.jit._builtins._find_builtin", "torch.jit knows the stand-in for a function of torch"),
        Name("torch.jit._builtins._register_builtin", "torch.jit knows the stand-in for a function of torch"),
    ),
    *needed_by((SCRIPTED_CALLS,), Name("torch.jit._script._script_impl._torchdynamo_inline", "its function")),
    *needed_by(
        (RESHAPED,),
        Name("torch._C._storage_Use_Count", "whether others have the memory that a parameter in shards had before"),
        Name("torch.Tensor._post_accumulate_grad_hooks", "hooks of a parameter go with its shards"),
        Name("torch.autograd._engine_run_backward", "hooks of a parameter are called with its whole gradient"),
        Name("torch._C._swap_tensor_impl", "a parameter takes another shape or dtype, and stays the same object"),
    ),
    *needed_by((HOOKED, RESHAPED), Name("torch.Tensor._backward_hooks", "hooks of a parameter go with its shards")),
    *needed_by((HOOKED,), Name("torch._C._FunctionBase._register_hook_dict", "a bucket is notified of gradients")),
    *needed_by(
        (LAYERS,),
        Name("torch._C.DispatchKeySet", "a convolution that one rank computes alone is torch's, at once"),
        Name("torch._C._ExcludeDispatchKeyGuard", "a convolution that one rank computes alone is torch's, at once"),
        Name("torch._C._IncludeDispatchKeyGuard", "a convolution that one rank computes alone is torch's, at once"),
        Name("torch._C._will_engine_execute_node", "whether a program asks for a parameter's gradient"),
        Name("torch._C._is_torch_function_mode_enabled", "whether a program watches the functions that a layer calls"),
        Name("torch.nn.BatchNorm2d._check_input_dim", "that a batch norm raises what torch's does"),
        Name("torch.nn.modules.module._has_any_global_hook", "whether a program watches all modules"),
    ),
    *needed_by(
        (IN_PLACE,),
        Name("torch.utils._python_dispatch.return_and_correct_aliasing", "an operator returns what it changes itself"),
    ),
    *needed_by((DEFERRED, READING), Name("torch.Tensor._make_wrapper_subclass", _READING)),
    *needed_by((STRANGERS,), Name("torch._library.simple_registry.singleton", "the rules for a program's DTensors")),
    *needed_by(
        (UNRULED,),
        Name("torch._decomp.decomposition_table", "what an operator is made of"),
        Name("torch._ops.HigherOrderOperator.dispatch", "operators of functions, to which no rule is given"),
        Name("torch.distributed.tensor.DTensor._op_dispatcher._dispatch_get_local_results_slow_path", _WHOLE),
        Name("torch.distributed.tensor.DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path", _WHOLE),
    ),
    *needed_by(
        (IN_TURN, UNRULED),
        Name("torch.utils._python_dispatch._get_current_dispatch_mode", "whether an operator is traced, or called"),
    ),
    *needed_by((OLD_HOOKS,), Name("torch.nn.Module._is_full_backward_hook", "whose gradients hooks are given")),
    *needed_by((PRINTED,), Name("torch._tensor_str.PRINT_OPTS", "how wide torch prints a tensor")),
    *needed_by((DIFFERENCES,), Name("torch.distributed.distributed_c10d._get_default_store", "the store of ranks")),
    *needed_by((DDP,), Name("torch.nn.parallel.distributed.DistributedDataParallel._set_static_graph", "DDP alone")),
    *needed_by((COMPILED, NEW_TENSORS), Name("torch.Tensor._is_view", "whether an input, or a new tensor, is a view")),
    *needed_by(
        (NEW_TENSORS, UNWRITTEN),
        Name("torch.utils._device._device_constructors", "memory without values, also within `with torch.device(...)`"),
    ),
    *needed_by(
        (FULLY_SHARDED, IN_TURN),
        Name("torch._C._autograd._top_saved_tensors_default_hooks", "whether a program saves itself"),
    ),
    *needed_by(
        (ENDED_JOBS,),
        Name("torch.distributed.device_mesh.DeviceMesh._get_root_mesh", "the mesh that has the groups of its slices"),
        Name("torch.distributed.device_mesh.DeviceMesh._pg_registry", "a mesh has groups that were destroyed"),
    ),
    *needed_by((SHUTDOWN,), Name("torch.library.Library._destroy", "kernels of operators are taken back")),
)
"""The private names that distconv needs."""


@functools.cache
def check() -> None:
    """Asks this torch for every name that distconv and mucudnn need; MissingName for one that it lacks."""
    with uncollected():
        mucudnn.private_names.check_names()
        importlib.import_module("torch.distributed.tensor")  # most are there, and torch does not import it by itself
    mucudnn.private_names.demand("distconv", NAMES)


@functools.cache
def lacks(feature: str) -> str:
    """Why a feature is off, in one line; empty where torch has all that it needs."""
    return mucudnn.private_names.reason_off(feature, NAMES)


def require(*features: str) -> None:
    """MissingName where one of these features is off."""
    check()
    for line in filter(None, map(lacks, features)):
        raise MissingName(line)


def refused(line: str) -> Callable[..., Any]:
    """In the place of a function of torch that a feature needs: MissingName with the line for whoever calls it."""

    def call(*_: Any, **__: Any) -> Any:
        raise MissingName(line)

    return call
