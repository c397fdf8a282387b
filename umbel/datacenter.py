"""In a data center: means for training loops of one's own, and one client of several ranks."""

from umbel.client.datacenter.attach import CodecName, comm_hook, outer_sync
from umbel.client.silo.run import rank_part, run_silo

__all__ = ["CodecName", "comm_hook", "outer_sync", "rank_part", "run_silo"]
