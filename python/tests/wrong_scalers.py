"""Loss scalers with one bug each, for `python -m gradscale.testing wrong_scalers.<name>`."""

import torch


class KeepsCounting(torch.amp.GradScaler):
    """An overflow does not reset the count of clean steps."""

    def update(self, new_scale=None):
        tracker = self._growth_tracker.clone()
        found_inf = any(float(f) for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values())
        super().update(new_scale)
        if found_inf:
            self._growth_tracker.copy_(tracker)


class StepsAnyway(torch.amp.GradScaler):
    """The optimizer steps whether or not an inf was found."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


class ForgetsTracker(torch.amp.GradScaler):
    """A checkpoint does not hold the count of clean steps."""

    def state_dict(self):
        return {**super().state_dict(), "_growth_tracker": 0}
