"""An encoder to fine-tune, on one device."""

from support.devices import all_devices, one_device  # noqa: F401
from support.encoders import checkpoint, sentencepiece_checkpoint  # noqa: F401
