"""Every elementwise rule of `pallas_kernels`; the statistics, which update nothing, are last."""

from pallas_kernels import gradients, muon, optimizers

RULES = [
    optimizers.ADAMW,
    optimizers.LION,
    optimizers.SGD,
    optimizers.SGD_NESTEROV,
    optimizers.LAMB_MOMENTS,
    optimizers.LAMB_APPLY,
    muon.MUON_MOMENTUM,
    muon.MUON_DESCENT,
    muon.NESTEROV_ADAM,
    gradients.GRADIENT_STATS,
]
