"""In a data center: one client of several ranks; and, for training loops of one's own, means in few bits and optimizers
for large batches.
"""

from umbel.client.datacenter.loops.attach import CodecName, comm_hook, outer_sync
from umbel.client.datacenter.loops.mean_record import MeanRecord
from umbel.client.datacenter.silo.run import rank_part, run_silo
from umbel.client.local.large_batch import Lamb, Lars

__all__ = ["CodecName", "Lamb", "Lars", "MeanRecord", "comm_hook", "outer_sync", "rank_part", "run_silo"]
