"""The tests that `make test` leaves out: they take long, and faster ones go the same ways. `make test-slow` runs them,
and so does every nightly run.
"""

from __future__ import annotations

_TRAINED_BY_FOUR = "sample=4|width=4|depth=4|height=4|width=2,sample=2|sample=2,depth=2"

SLOW = (
    # Partitions and layers beside those of each kind that stay.
    rf"model/test_networks.py::test_training_equals_one_process\[gloo-.*-4-({_TRAINED_BY_FOUR})\]",
    r"model/test_networks.py::.*\[(gloo-)?wide_resnet50",
    r"model/test_fully_sharded.py::test_training_equals_one_process\[gloo-height=4\]",
    r"model/test_fully_sharded.py::test_training_in_turn_equals_one_process\[gloo-more\]",
    r"compiled/test_graph_regathers.py::.*\[gloo-default_partition\]",
    r"compiled/test_compiler_files.py::test_a_second_start_does_not_find_another_ranks_graph",
    r"distconv/testing/test_testing.py::test_what_differs_is_reported",
    r"model/test_second_derivatives.py::.*channel=2,filter=2\]",
    r"model/test_results.py::test_files_hold_plain_tensors_at_any_depth\[gloo-sample=2,channel=2\]",
    r"model/test_state.py::test_saved_on_some_ranks_and_loaded_on_others\[gloo-sample=4",
    r"model/test_rounding.py::.*\[gloo-sample=2,height=2\]",
    r"model/test_transformers.py::test_blocks_equal_one_process\[gloo-(height=4|sample=2,channel=2)\]",
    r"compiled/test_merged_collectives.py::test_fewer_collectives.*(height=2-Blocks|channel=4-Narrow)",
    r"rules/test_recurrent.py::test_recurrent_layers_equal_one_process\[gloo-width=2\]",
    r"rules/test_convolution.py::.*\[gloo-.*(3-|-width=4|-channel=4|filter=2,sample=2|width=2,sample=2|depth=2,height=2)",
    r"rules/test_pool_positions.py::test_inductor_compiles_positions",
    r"benchmarks/test_predicted_bytes.py::test_messages_of_split_channels\[.*-layer\]",
    r"benchmarks/test_predicted_bytes.py::test_messages_of_channels_and_filters_split",
    r"reading/test_store.py::test_batches_are_those_without_a_store.*\[gloo-sample=2-1-spawn\]",
    r"model/direct/test_chains.py::test_random_layers_in_turn",
    r"turns/test_shapes_only.py::.*\[a residual network's training step-True\]",
    r"compiled/test_merged_collectives.py::test_fewer_collectives.*sample=2,channel=2-Blocks",
    r"turns/test_following.py::test_what_is_followed_is_what_runs\[a residual network's training step-131072\]",
    r"turns/test_following.py::test_what_is_followed_is_what_runs\[a residual network's training step-2097152\]",
    r"compiled/test_compiled_networks.py::.*\[gloo-resnet18-height=2\]",
    r"reading/test_reading.py::test_batches_are_those_of_one_process\[gloo-depth=2-raw-1-spawn\]",
    r"model/test_second_derivatives.py::.*\[gloo-sample=2,channel=2\]",
    r"model/test_transformers.py::test_blocks_equal_one_process\[gloo-height=2,width=2\]",
    r"rules/test_recurrent.py::test_recurrent_layers_equal_one_process\[gloo-sample=2\]",
    r"turns/test_simulation.py::test_one_part_shows_what_all_take\[(two axes|a residual network's|inference)\]",
    r"model/test_rounding.py::.*\[mpi-sample=2,height=2\]",
    # Launchers beside the one that stays.
    r"job/test_faults.py::test_exit_codes_are_the_scripts\[(one|all)-mpiexec\]",
    r"job/test_faults.py::test_an_exception_is_shown_once_as_python_shows_it\[all-mpiexec\]",
    r"turns/test_scripts_in_turn.py::test_a_training_script_on_ranks_in_turn_prints_what_it_prints_alone\[mpiexec\]",
    r"performance/test_choosing.py::test_ranks_of_a_launcher_run_under_what_is_chosen",
    r"job/test_going_on.py::test_torchrun_starts_anew_and_fewer_ranks_go_on",
    r"job/test_surroundings.py::test_ranks_draw_the_same_and_see_one_process\[torchrun\]",
    r"job/test_launch.py::test_a_script_sees_its_arguments_and_prints_once\[torchrun\]",
    r"job/test_faults.py::test_a_rank_that_ends_early_is_named\[(early|leave)-mpiexec\]",
    r"job/test_standstill.py::.*\[mpiexec\]",
    r"files/test_side_effects.py::test_a_folder_holds_what_one_process_leaves\[torchrun\]",
    r"job/test_surroundings.py::test_ranks_draw_the_same_and_see_one_process\[mpiexec\]",
    r"job/test_faults.py::test_a_killed_rank_is_named_first_and_ends_the_others\[mpiexec\]",
    r"job/test_faults.py::test_an_exception_is_shown_once_as_python_shows_it\[one-mpiexec\]",
    r"tests/test_neighbours.py::test_the_script_finds_its_own_modules\[(mucudnn-another|distconv-another|torchrun|mpiexec-its)",
    # Benchmarks, campaigns and the built wheel, of whose parts there are tests.
    r"benchmarks/test_thread_faults.py::test_nothing_hangs",
    r"benchmarks/test_campaign.py::test_random_convolutions_are_right",
    r"benchmarks/test_campaign.py::test_a_wrong_convolution_is_noticed",
    r"benchmarks/test_distributed.py::test_(halo_traffic|every_arm_is_timed)",
    r"benchmarks/test_reading_pipelines.py::test_the_brain_read_from_zarr",
    r"benchmarks/test_brain.py::test_(another_seed|peak_memory)",
    r"tests/test_packaging.py::test_commands_of_an_installed_wheel",
    r"benchmarks/test_operators.py::test_outcomes_are_distinguished",
    r"benchmarks/test_brain.py::(.*brain_slices|test_a_picture_from_saved_weights)",
    r"optimizer/test_exploration.py::test_settles_on_the_best.*\[0.05\]",
)
"""Expressions that are searched for in the names of tests."""
