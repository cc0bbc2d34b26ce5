"""What DeepSpeed's dynamic loss scaler does, told in plain Python, independent of zerojax's own."""

from zerojax.config import LossScale


class PlainScaler:
    """DeepSpeed's `DynamicLossScaler` told again: an object that remembers step numbers.

    After deepspeed/runtime/fp16/loss_scaler.py, with a maximum. It goes on at the floor, as that
    class does with `raise_error_at_min_scale=False`, and says so in `at_floor`.
    """

    def __init__(self, config: LossScale):
        self.config = config
        self.scale = config.initial
        self.tolerance = config.hysteresis
        self.step_number = 0
        self.step_of_last_overflow = -1
        self.at_floor = False

    def observe(self, finite: bool) -> None:
        self.at_floor = False
        if finite:
            self._after_clean_step()
        else:
            self._after_overflow()
            self.step_of_last_overflow = self.step_number
        self.step_number += 1

    def _after_overflow(self) -> None:
        if self.tolerance > 1:
            self.tolerance -= 1
        elif self.scale == self.config.minimum:
            self.at_floor = True
        else:
            self.scale = max(self.scale / self.config.factor, self.config.minimum)

    def _after_clean_step(self) -> None:
        clean_before = self.step_number - self.step_of_last_overflow - 1
        grows = clean_before >= 1 and clean_before % self.config.window == 0
        if grows:
            self.scale = min(self.scale * self.config.factor, self.config.maximum)
        if grows or self.config.consecutive_hysteresis:
            self.tolerance = self.config.hysteresis

    @property
    def numbers(self) -> tuple[float, int, int, bool]:
        clean = self.step_number - self.step_of_last_overflow - 1
        return self.scale, clean, self.tolerance, self.at_floor
