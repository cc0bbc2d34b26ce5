"""Every public name of optax and optax.contrib: how its optimizer is used, or why it is none.

A row of `OPTIMIZERS` makes a transformation; a row of `REFUSED` has a part of the sentence with
which a plan refuses it; what is in `NO_OPTIMIZERS` changes no gradients of a step.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib as oc

Make = Callable[[], optax.GradientTransformation]
RATE = 0.05
PADDED, TRUE = "padded", "true shapes"


def _norm(tree: Any) -> jax.Array:
    return optax.tree.norm(tree)


def _every_other(step: jax.Array, **_: Any) -> jax.Array:
    return step % 2 == 0


def _labels(params: Any) -> Any:
    return {name: "a" if name < "e" else "b" for name in params}


def _mask(params: Any) -> Any:
    return {name: name > "e" for name in params}


def _injected(inject: Callable[..., Any]) -> optax.GradientTransformation:
    factory = inject(optax.adafactor, static_args="min_dim_size_to_factor")
    return factory(RATE, min_dim_size_to_factor=4)


def _muon_alone() -> optax.GradientTransformation:
    """Of one matrix; `optax.contrib.muon` gives the rest to Adam in the same way."""

    def dims(updates: Any) -> Any:
        return updates | {"kernel": oc.MuonDimensionNumbers(0, 1)}

    inner = oc.scale_by_muon(weight_dimension_numbers=dims)
    return optax.masked(inner, {name: name == "kernel" for name in MASK})


TRANSFORMS = {"a": optax.adafactor(RATE), "b": optax.adam(RATE)}
MASK = {"bias": True, "kernel": False, "table": True}

OPTAX: dict[str, tuple[str, Make]] = {
    "adabelief": (PADDED, lambda: optax.adabelief(RATE)),
    "adadelta": (PADDED, lambda: optax.adadelta(RATE)),
    "adafactor": (TRUE, lambda: optax.adafactor(RATE, min_dim_size_to_factor=4)),
    "adagrad": (PADDED, lambda: optax.adagrad(RATE)),
    "adam": (PADDED, lambda: optax.adam(RATE)),
    "adamax": (PADDED, lambda: optax.adamax(RATE)),
    "adamaxw": (PADDED, lambda: optax.adamaxw(RATE)),
    "adamw": (PADDED, lambda: optax.adamw(RATE)),
    "adan": (PADDED, lambda: optax.adan(RATE)),
    "adaptive_grad_clip": (PADDED, lambda: optax.adaptive_grad_clip(0.1)),
    "add_decayed_weights": (PADDED, lambda: optax.add_decayed_weights(0.1)),
    "add_noise": (TRUE, lambda: optax.add_noise(0.1, 0.5, key=0)),
    "amsgrad": (PADDED, lambda: optax.amsgrad(RATE)),
    "apply_every": (PADDED, lambda: optax.apply_every(2)),
    "apply_if_finite": (PADDED, lambda: optax.apply_if_finite(optax.adam(RATE), 3)),
    "centralize": (TRUE, optax.centralize),
    "chain": (PADDED, lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(RATE))),
    "clip": (PADDED, lambda: optax.clip(0.3)),
    "clip_by_block_rms": (TRUE, lambda: optax.clip_by_block_rms(0.3)),
    "clip_by_global_norm": (PADDED, lambda: optax.clip_by_global_norm(0.5)),
    "conditionally_mask": (PADDED, lambda: optax.conditionally_mask(optax.sgd(1.0), _every_other)),
    "conditionally_transform": (
        PADDED,
        lambda: optax.conditionally_transform(optax.sgd(1.0), _every_other),
    ),
    "ema": (PADDED, lambda: optax.ema(0.9)),
    "flatten": (TRUE, lambda: optax.flatten(optax.adam(RATE))),
    "freeze": (PADDED, lambda: optax.freeze(MASK)),
    "fromage": (TRUE, lambda: optax.fromage(RATE)),
    "identity": (PADDED, optax.identity),
    "inject_hyperparams": (TRUE, lambda: _injected(optax.inject_hyperparams)),
    "inject_stateful_hyperparams": (
        TRUE,
        lambda: _quietly(_injected, optax.inject_stateful_hyperparams),
    ),
    "keep_params_nonnegative": (PADDED, optax.keep_params_nonnegative),
    "lamb": (TRUE, lambda: optax.lamb(RATE)),
    "lars": (TRUE, lambda: optax.lars(RATE)),
    "lion": (PADDED, lambda: optax.lion(RATE)),
    "masked": (TRUE, lambda: optax.masked(optax.centralize(), _mask)),
    "multi_transform": (TRUE, lambda: optax.multi_transform(TRANSFORMS, _labels)),
    "nadam": (PADDED, lambda: optax.nadam(RATE)),
    "nadamw": (PADDED, lambda: optax.nadamw(RATE)),
    "named_chain": (PADDED, lambda: optax.named_chain(("one", optax.adam(RATE)))),
    "noisy_sgd": (TRUE, lambda: optax.noisy_sgd(RATE, key=0)),
    "normalize_by_update_norm": (PADDED, optax.normalize_by_update_norm),
    "novograd": (PADDED, lambda: optax.novograd(RATE)),
    "optimistic_adam": (PADDED, lambda: _quietly(optax.optimistic_adam, RATE)),
    "optimistic_adam_v2": (PADDED, lambda: optax.optimistic_adam_v2(RATE)),
    "optimistic_gradient_descent": (PADDED, lambda: optax.optimistic_gradient_descent(RATE)),
    "partition": (TRUE, lambda: optax.partition(TRANSFORMS, _labels)),
    "polyak_sgd": (PADDED, optax.polyak_sgd),
    "radam": (PADDED, lambda: optax.radam(RATE)),
    "rmsprop": (PADDED, lambda: optax.rmsprop(RATE)),
    "rprop": (PADDED, lambda: optax.rprop(RATE)),
    "scale": (PADDED, lambda: optax.scale(-RATE)),
    "scale_by_adadelta": (PADDED, optax.scale_by_adadelta),
    "scale_by_adam": (PADDED, optax.scale_by_adam),
    "scale_by_adamax": (PADDED, optax.scale_by_adamax),
    "scale_by_adan": (PADDED, optax.scale_by_adan),
    "scale_by_amsgrad": (PADDED, optax.scale_by_amsgrad),
    "scale_by_belief": (PADDED, optax.scale_by_belief),
    "scale_by_distance_over_gradients": (TRUE, optax.scale_by_distance_over_gradients),
    "scale_by_factored_rms": (TRUE, lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4)),
    "scale_by_lbfgs": (TRUE, lambda: optax.scale_by_lbfgs(memory_size=2)),
    "scale_by_learning_rate": (PADDED, lambda: optax.scale_by_learning_rate(RATE)),
    "scale_by_lion": (PADDED, optax.scale_by_lion),
    "scale_by_novograd": (PADDED, optax.scale_by_novograd),
    "scale_by_optimistic_gradient": (PADDED, optax.scale_by_optimistic_gradient),
    "scale_by_param_block_norm": (TRUE, optax.scale_by_param_block_norm),
    "scale_by_param_block_rms": (TRUE, optax.scale_by_param_block_rms),
    "scale_by_polyak": (PADDED, optax.scale_by_polyak),
    "scale_by_radam": (PADDED, optax.scale_by_radam),
    "scale_by_rms": (PADDED, optax.scale_by_rms),
    "scale_by_rprop": (PADDED, lambda: optax.scale_by_rprop(RATE)),
    "scale_by_rss": (PADDED, optax.scale_by_rss),
    "scale_by_schedule": (
        PADDED,
        lambda: optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.2, 3)),
    ),
    "scale_by_sign": (PADDED, optax.scale_by_sign),
    "scale_by_sm3": (TRUE, optax.scale_by_sm3),
    "scale_by_stddev": (PADDED, optax.scale_by_stddev),
    "scale_by_trust_ratio": (TRUE, optax.scale_by_trust_ratio),
    "scale_by_yogi": (PADDED, optax.scale_by_yogi),
    "selective_transform": (
        PADDED,
        lambda: optax.selective_transform(optax.adam(RATE), freeze_mask=MASK),
    ),
    "set_to_zero": (PADDED, optax.set_to_zero),
    "sgd": (PADDED, lambda: optax.sgd(RATE, momentum=0.9)),
    "sign_sgd": (PADDED, lambda: optax.sign_sgd(RATE)),
    "signum": (PADDED, lambda: optax.signum(RATE)),
    "sm3": (TRUE, lambda: optax.sm3(RATE)),
    "snapshot": (PADDED, lambda: optax.snapshot("norm", _norm)),
    "stateless": (
        TRUE,
        lambda: optax.stateless(lambda g, _: {n: x / jnp.max(abs(x)) for n, x in g.items()}),
    ),
    "stateless_with_tree_map": (
        TRUE,
        lambda: optax.stateless_with_tree_map(lambda g, p: g + jnp.mean(p)),
    ),
    "trace": (PADDED, lambda: optax.trace(0.9)),
    "with_extra_args_support": (PADDED, lambda: optax.with_extra_args_support(optax.sgd(RATE))),
    "yogi": (PADDED, lambda: optax.yogi(RATE)),
    "zero_nans": (PADDED, optax.zero_nans),
}
"""{name: (on which arrays it runs where parameters are padded, what makes it)}. "padded": proven to
compute the same on padded arrays; "true shapes": given arrays of their true shapes."""

CONTRIB: dict[str, tuple[str, Make]] = {
    "acprop": (PADDED, lambda: oc.acprop(RATE)),
    "ademamix": (PADDED, lambda: oc.ademamix(RATE)),
    "adopt": (PADDED, lambda: oc.adopt(RATE)),
    "cocob": (PADDED, oc.cocob),
    "dadapt_adamw": (TRUE, oc.dadapt_adamw),
    "dog": (PADDED, oc.dog),
    "dowg": (PADDED, oc.dowg),
    "galore": (TRUE, lambda: oc.galore(RATE, rank=2, update_proj_gap=2)),
    "madgrad": (PADDED, lambda: oc.madgrad(RATE)),
    "mechanize": (TRUE, lambda: oc.mechanize(optax.sgd(RATE))),
    "momo": (TRUE, oc.momo),
    "momo_adam": (TRUE, oc.momo_adam),
    "muon": (TRUE, lambda: oc.muon(RATE)),
    "normalize": (PADDED, oc.normalize),
    "prodigy": (TRUE, oc.prodigy),
    "reduce_on_plateau": (PADDED, lambda: oc.reduce_on_plateau(patience=1)),
    "sam": (PADDED, lambda: oc.sam(optax.sgd(RATE), optax.chain(oc.normalize(), optax.sgd(0.1)))),
    "scale_by_acprop": (PADDED, oc.scale_by_acprop),
    "scale_by_ademamix": (PADDED, oc.scale_by_ademamix),
    "scale_by_adopt": (PADDED, oc.scale_by_adopt),
    "scale_by_cocob": (PADDED, oc.scale_by_cocob),
    "scale_by_galore": (TRUE, lambda: oc.scale_by_galore(rank=2, update_proj_gap=2)),
    "scale_by_madgrad": (PADDED, lambda: oc.scale_by_madgrad(RATE)),
    "scale_by_muon": (TRUE, _muon_alone),
    "scale_by_simplified_ademamix": (PADDED, oc.scale_by_simplified_ademamix),
    "schedule_free": (PADDED, lambda: oc.schedule_free(optax.sgd(RATE), RATE)),
    "schedule_free_adamw": (PADDED, oc.schedule_free_adamw),
    "schedule_free_sgd": (PADDED, oc.schedule_free_sgd),
    "simplified_ademamix": (PADDED, lambda: oc.simplified_ademamix(RATE)),
    "split_real_and_imaginary": (PADDED, lambda: oc.split_real_and_imaginary(optax.adam(RATE))),
}

AGAIN = "does not compute the loss again at other parameters"
REFUSED: dict[str, tuple[str, Make]] = {
    "lbfgs": (AGAIN, optax.lbfgs),
    "scale_by_backtracking_linesearch": (AGAIN, lambda: optax.scale_by_backtracking_linesearch(3)),
    "scale_by_zoom_linesearch": (AGAIN, lambda: optax.scale_by_zoom_linesearch(3)),
    "lookahead": (
        "optax.LookaheadParams",  # it has two of each
        lambda: optax.lookahead(optax.adam(RATE), 2, 0.5),
    ),
    "measure_with_ema": (
        r"an array \[13\] becomes \[\]",  # for `monitor`: it returns no updates
        lambda: optax.measure_with_ema(_norm, 0.9),
    ),
    "monitor": ("3 arrays become 4", lambda: optax.monitor({"norm": _norm})),
    "differentially_private_aggregate": (
        "cannot update these parameters",
        lambda: oc.differentially_private_aggregate(1.0, 0.1, key=0),
    ),
    "dpsgd": ("cannot update these parameters", lambda: _quietly(oc.dpsgd, RATE, 1.0, 0.1, 0)),
    "hutchinson_estimator_diag_hessian": (
        "obj_fn must be provided",
        oc.hutchinson_estimator_diag_hessian,
    ),
    "sophia": ("obj_fn must be provided", lambda: oc.sophia(RATE)),
}

NO_OPTIMIZERS = {
    "losses and metrics, for the user's own loss": """
        convex_kl_divergence cosine_distance cosine_similarity ctc_loss ctc_loss_with_forward_probs
        generalized_kl_divergence hinge_loss huber_loss kl_divergence l2_loss log_cosh ntxent
        safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels
        softmax_cross_entropy softmax_cross_entropy_with_integer_labels squared_error
        multi_normal""",
    "schedules, for a learning rate": """
        constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay
        join_schedules linear_onecycle_schedule linear_schedule piecewise_constant_schedule
        piecewise_interpolate_schedule polynomial_schedule sgdr_schedule warmup_constant_schedule
        warmup_cosine_decay_schedule warmup_exponential_decay_schedule""",
    "arithmetic on trees and numbers, of which transformations are made": """
        apply_updates bias_correction global_norm incremental_update init_empty_state
        matrix_inverse_pth_root nnls periodic_update power_iteration safe_increment
        safe_int32_increment safe_norm safe_root_mean_squares scale_gradient tree_map_params
        update_infinity_moment update_moment update_moment_per_elem_norm""",
    "gradients of single examples, or of parts of a batch; use num_microbatches": """
        microbatch per_example_global_norm_clip per_example_layer_norm_clip""",
    "conditions for optax.MultiSteps": "skip_large_updates skip_not_finite",
    "for a loop that evaluates the loss itself": "value_and_grad_from_state",
    "reads parameters out of a state": "schedule_free_eval_params",
    "types": "MaskOrFn OptState Params ScalarOrSchedule Schedule Updates",
}
NOT_FUNCTIONS = {"MultiSteps"}
"""Classes that people give as an optimizer."""


def _quietly(make: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make(*arguments)


def public_names(module: Any) -> set[str]:
    """What may be a transformation, or make one: everything but modules, states and other types."""
    names = {name for name in dir(module) if not name.startswith("_")}
    return {
        name
        for name in names
        if name in NOT_FUNCTIONS
        or (
            not inspect.ismodule(getattr(module, name))
            and not inspect.isclass(getattr(module, name))
        )
    }
