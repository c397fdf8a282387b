"""For training loops of one's own in a data center: rare means of the model, means of gradients in few bits, and
optimizers for large batches.
"""

from umbel.client.datacenter.attach import CodecName, comm_hook, outer_sync
from umbel.client.local.large_batch import Lamb, Lars

__all__ = ["CodecName", "Lamb", "Lars", "comm_hook", "outer_sync"]
