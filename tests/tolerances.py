"""Every tolerance of the test suite, with its reason. Nothing is compared outside this table."""

TOLERANCES: dict[str, float] = {
    # Loss of one micro-batch in float32, relative: only the order of summation differs (2e-7 seen).
    "loss_fp32_relative": 1e-5,
    # ||gradient - reference|| / ||reference|| per tensor in float32 (issue 2, "Must show" 1).
    "gradient_fp32_relative": 1e-5,
    # Loss of one micro-batch in bfloat16 against upstream's in bfloat16, relative: the same products, rounded alike, in
    # chunks (6e-7 seen; both are up to 2e-3 away from float32).
    "loss_bf16_relative": 1e-5,
    # Printed losses carry 4 digits (issue 2, "Must show" 1).
    "printed_loss": 1e-4,
    # The same where the reference lies on a rounding limit (moss_tts_local_v1.5: 3.7096498 against 3.7096500, printed
    # as 3.7096 and 3.7097): one unit of the last printed digit, which as a difference of floats is 2e-15 more.
    "printed_loss_unit": 1.00001e-4,
    # Error of our bf16 gradients against fp32, as a multiple of upstream's own bf16 error (issue 2, 2).
    "gradient_bf16_error_ratio": 1.1,
    # Loss and per-tensor gradients of the miniature against upstream in float32, relative: the same operations in
    # another arrangement; 0.0 seen, one unit of rounding (1.2e-7) is not a difference.
    "miniature_relative": 1e-6,
    # Sum of many bf16 chunk gradients against the one rounding that any bf16 result needs: 1.0001 seen.
    "chunk_sum_over_one_rounding": 1.01,
    # Projection of the bf16 update on the fp32 update after 100 steps (issue 2, "Must show" 4): 0.987 to 1.009 seen
    # with 16,384 weights, 0.997 with 65,536; the noise falls with the root of their number.
    "optimizer_projection": 0.97,
    # The same for torch's AdamW in bf16, the negative control: 0.08 seen.
    "optimizer_projection_plain_bf16": 0.5,
    # Largest step, in learning rates, of a weight whose gradient became zero: 1 seen, 127 without the protection.
    "optimizer_step_after_zero_gradient": 3.0,
    # Weights of the torch path and of the kernel in float32: one unit in the last place of the weight and one of each
    # update (at most 3 learning rates, 3 steps), from MKL's square root.
    "optimizer_kernel_fp32_relative": 1.2e-7,
    "optimizer_kernel_fp32_over_lr": 2e-6,
    # ... in bfloat16: one in 2**16 of such a unit crosses a rounding limit; share of weights that may differ.
    "optimizer_kernel_bf16_share": 1e-3,
    # Distance of our 8-bit states from bitsandbytes', as a multiple of the quantisation error of either: 0.24 seen.
    "optimizer_states_over_quantisation_error": 1.0,
    # AdamW with fp32 states against torch's, in learning rates: other order of operations (2e-4 seen: one unit in the
    # last place of a weight of 0.05 is 4e-9, at lr 1e-3).
    "optimizer_formula_over_lr": 1e-3,
    # Host memory beyond the states themselves (amendments, "Host stores").
    "host_arena_overhead": 0.02,
    # Bytes of 8-bit states an element: 2 codes and 8 / 256 for the two absmax are 2.03125.
    "optimizer_bytes_per_element": 2.04,
    # Weights after some steps of AdamW in float32: AdamW divides by the gradient's own size, so rounding noise in a
    # near-zero gradient becomes a visible update; everything else agrees to 2e-7.
    "weights_share_of_learning_rate": 0.01,
    "weights_differing_share": 1e-4,
    # Final loss of bf16 training with the layer's optimizer against float32 (issue 3, "Must show" 5): 0.02 % seen after
    # 100 steps, 0.1 % after 1000.
    "convergence_final_loss_relative": 0.02,
    # ... and of how far the loss came down, which is the sharper test in a short run: 0.2 % seen.
    "convergence_decrease_relative": 0.02,
    # Share of float32's decrease that plain bf16 and nearest rounding may reach and be called left behind: 9 % seen.
    "convergence_decrease_left_behind": 0.25,
    # Share of the loss that the float32 run has to take off for the three above to mean something: 6 % seen.
    "convergence_learnt_share": 0.05,
    # Peak bytes of what stands in for a forward that looks at values, against that forward: index tensors differ.
    "stand_in_peak_relative": 0.02,
    # Decrease of the loss along the gradient against the gradient's norm: curvature and float32 differences of a step
    # of 1e-4 (0.5 % seen); a mask drawn anew is off by 20 % and more.
    "directional_derivative": 0.03,
    # Loss of a saved adapter or merged checkpoint in another process, float32, relative (issue 5, "Must show" 1).
    "reloaded_loss": 1e-5,
    # Merged weights against PEFT's own merge in float32, per tensor: 0.0 seen, since PEFT does both; a matrix library
    # may sum a product in another order for another number of rows.
    "merged_weights_fp32_relative": 1e-6,
    # Peak memory of a merge on top of the imports, over the size of the largest shard (issue 5, "Must show" 4).
    "merge_peak_over_largest_shard": 1.5,
    # Mean of a few float32 losses as a log line holds it: one unit in the last place of each sum and quotient.
    "log_mean": 1e-6,
    # Peak of a rung from a few layers and chunks against its full simulation (amendments, "Planner"): 0.02 % seen at
    # full size, where the batch that a full simulation holds is the difference.
    "planner_relative": 0.01,
    # Peak of the tracker in a small real run against the storages that are alive in it (issue 6, "Must show" 1).
    "tracker_relative": 0.03,
    # Peak of a small real step, live storages counted, against the simulated one (issue 6, "Must show" 1): 0.1 % seen.
    "simulated_peak_relative": 0.03,
    # What an engine has in forward and backward and the formula leaves to the simulation: fresh gradients of up to
    # three layers of a model that has six; 9.3 % was seen (ZeRO-2 on four ranks), where three layers are 9 %.
    "engine_backward_missing": 0.1,
    # Slices that are not there at the same moment: at most 1 % was seen.
    "engine_backward_excess": 0.02,
    # No layer is at work in a step; 1.7 % was seen, where a partition ends within a weight.
    "engine_step_bytes": 0.02,
    # CPU time of a micro-batch with `fused` over upstream's with checkpointing (issue 9): 0.64 to 0.68 seen.
    "fused_cpu_time": 0.70,
    # Share of float32's decrease of the loss, through the real trainer: upstream's bf16 weights keep 26 % of it,
    # adapters at ten times the rate reach more than all of it.
    "trainer_decrease_left_behind": 0.5,
    "trainer_decrease_of_adapters": 0.9,
}
