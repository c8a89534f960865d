"""A scaler of one's own, without torch."""


class Plain:
    """A scaler that is told: halves, and doubles after ``interval`` clean steps."""

    def __init__(self, interval=3, scale=8.0):
        self.interval, self.loss_scale, self.clean = interval, scale, 0

    def update(self, found_inf):
        self.clean = 0 if found_inf else self.clean + 1
        if found_inf:
            self.loss_scale /= 2
        elif self.clean == self.interval:
            self.loss_scale, self.clean = self.loss_scale * 2, 0

    def state_dict(self):
        return {"loss_scale": self.loss_scale, "clean": self.clean}

    def load_state_dict(self, state):
        self.__dict__.update(state)
