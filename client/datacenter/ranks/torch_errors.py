"""Errors of torch.distributed, Gloo and NCCL as a sentence with what to do.

torch says most of them as a `RuntimeError` whose text names a file of its C++ code. The patterns are parts of such
texts, in the order in which they are tried. Those of NCCL are as users have reported them.
"""

import re
import socket

_ANSWER_S = 5.0
_DRIVER = "the GPU driver, CUDA and NCCL must fit together: umbel doctor --distributed shows those of all ranks"

CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"Duplicate GPU detected",
        "two ranks use the same GPU, which NCCL refuses: start at most as many ranks on a machine as it has GPUs "
        "(--nproc-per-node)",
    ),
    (
        r"out of memory",
        "the memory of a GPU or a machine is full: take smaller batches, accumulate gradients, or shard the model",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "another job has this port on this machine: end it, or choose another port (MASTER_PORT, or torchrun "
        "--rdzv-endpoint HOST:PORT)",
    ),
    (
        r"Unable to find address for|no socket interface found|Bootstrap : no",
        "there is no such network interface, or it has no address: set GLOO_SOCKET_IFNAME (for NCCL, "
        "NCCL_SOCKET_IFNAME) to one that `ip address` shows, or leave it out",
    ),
    (
        r"gai error|Name or service not known|Temporary failure in name resolution|getaddrinfo",
        "the name of a machine cannot be resolved: name the machines by their addresses (MASTER_ADDR, "
        "--rdzv-endpoint), or correct /etc/hosts",
    ),
    (
        r"driver version is insufficient|CUDA driver version|no kernel image",
        f"this GPU driver does not suit this torch: {_DRIVER}",
    ),
    (
        r"unhandled cuda error|ncclUnhandledCudaError",
        f"a CUDA call inside of NCCL failed: {_DRIVER}. NCCL_DEBUG=WARN names the call",
    ),
    (
        r"unhandled system error|ncclSystemError",
        "a system call inside of NCCL failed, most often because ranks cannot reach each other, or /dev/shm is too "
        "small: set NCCL_SOCKET_IFNAME to the interface between the machines; NCCL_DEBUG=WARN names the call",
    ),
    (
        r"Invalid scalar type|not supported for NCCL process group",
        "this backend cannot add up tensors of this type: take float32, int32 or int64",
    ),
    (
        r"connectFullMesh|Connect timeout",
        "the ranks know each other's addresses, but cannot connect: open all ports between the machines, and set "
        "GLOO_SOCKET_IFNAME to the interface between them",
    ),
)
"""Patterns of errors that name a cause, and what to do."""

KILLED_OR_FAILED = "its log has the cause, unless it was killed from outside, as by the memory limit of its machine"
LOSSES: tuple[tuple[str, str], ...] = (
    (
        r"waiting for clients",
        "not all ranks have come; start as many as --nnodes and --nproc-per-node say, on all machines",
    ),
    (
        r"wait timeout after .* keys",
        "it has not come, or has ended at its start; its log has the cause, and its machine must reach this one",
    ),
    (
        r"Connection refused",
        "it refuses connections, because it has ended (its log has the cause) or a firewall is between the machines",
    ),
    (
        r"Connection reset|[Cc]onnection closed|Broken pipe|Socket closed|ncclRemoteError|remote process exited",
        KILLED_OR_FAILED,
    ),
    (
        r"[Tt]imed out|[Tt]imeout|Watchdog caught collective",
        "it did not come in time, because it is slow or hangs, or the network does (umbel doctor --distributed "
        "measures the links)",
    ),
)
"""Patterns of errors that only say that another rank does not answer, and why that may be."""


def cause_of(error: Exception) -> str | None:
    """What is wrong and what to do, if the error names a cause."""
    return _found(CAUSES, error)


def loss_of(error: BaseException) -> str | None:
    """Why another rank does not answer, if that is what the error says."""
    return _found(LOSSES, error)


def _found(table: tuple[tuple[str, str], ...], error: BaseException) -> str | None:
    text = str(error)
    return next((sentence for pattern, sentence in table if re.search(pattern, text)), None)


def unreachable(host: str, port: int) -> str:
    """Why the store of a job at this address could not be reached, in a sentence with what to do.

    It tries to connect, for some seconds at most.
    """
    place = f"{host}:{port}"
    try:
        socket.create_connection((host, port), _ANSWER_S).close()
    except socket.gaierror:
        return f"the name {host} cannot be resolved: set MASTER_ADDR to an address that all machines know"
    except ConnectionRefusedError:
        return f"{place} refuses connections: start rank 0 there, and check MASTER_ADDR and MASTER_PORT"
    except OSError:
        return f"nobody answers at {place}: a firewall blocks this port, or MASTER_ADDR and MASTER_PORT are wrong"
    return f"a program at {place} answers, but not as the store of this job: choose another MASTER_PORT"
