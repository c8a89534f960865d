"""Recording inside training frameworks, in one line each.

::

    Trainer(..., callbacks=[gradscale.integrations.TransformersCallback()])             # Hugging Face
    lightning.Trainer(..., callbacks=[gradscale.integrations.LightningCallback()])

Neither framework is imported here: a callback of theirs is any object with their methods.
"""

from .lightning import LightningCallback
from .transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback"]
