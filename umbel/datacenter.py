"""For training loops of one's own in a data center: rare means of the model, and means of gradients in few bits."""

from umbel.client.datacenter.attach import CodecName, comm_hook, outer_sync

__all__ = ["CodecName", "comm_hook", "outer_sync"]
