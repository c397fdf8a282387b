"""Errors of torch.distributed are sentences with what to do; a port that nobody answers at is named, and soon."""

import socket

import pytest
import torch.distributed as dist

from umbel.client.datacenter.ranks.group import GroupError, joined, lost_ranks_named
from umbel.client.datacenter.ranks.torch_errors import CAUSES, LOSSES, cause_of, loss_of, unreachable

KILLED = "its log has the cause, unless it was killed from outside, as by the memory limit of its machine"
GLOO = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, "
TEXTS = {  # as torch 2.13 says them over Gloo, and as users have reported those of NCCL
    f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nncclInvalidUsage: This usually "
    "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA "
    "device 10": "two ranks use the same GPU",
    "CUDA out of memory. Tried to allocate 2.00 GiB": "the memory of a GPU or a machine is full",
    "The server socket has failed to listen on any local network address. port: 36079, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use": "another job has this port on this machine",
    f"{GLOO}device.cc:84] ifa != nullptr. Unable to find address for: nope0": "there is no such network interface",
    "The IPv4 network addresses of (nowhere, 29500) cannot be retrieved (gai error: -2 - Name or service not known).": (
        "the name of a machine cannot be resolved"
    ),
    f"{NCCL}unhandled cuda error, NCCL version 2.21.5": "a CUDA call inside of NCCL failed",
    f"{NCCL}unhandled system error, NCCL version 2.18.1": "a system call inside of NCCL failed",
    "CUDA driver version is insufficient for CUDA runtime version": "this GPU driver does not suit this torch",
    "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error": (
        "open all ports between the machines"
    ),
    "Invalid scalar type": "this backend cannot add up tensors of this type",
    "Timed out after 3 seconds waiting for clients. 1/2 clients joined.": "not all ranks have come",
    "wait timeout after 3000ms, keys: /a/1//cpu//0/1": "it has not come, or has ended at its start",
    f"{GLOO}pair.cc:799] connect [172.31.71.170]:13195: Connection refused": "it refuses connections",
    f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:5190": KILLED,
    f"{GLOO}pair.cc:534] Read error [127.0.0.1]:51906: Connection reset by peer": KILLED,
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 120000ms for recv operation to complete": "it did not come in time",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_known_error_is_a_sentence(text: str) -> None:
    error = RuntimeError(text)
    assert TEXTS[text] in (cause_of(error) or loss_of(error) or "")


def test_every_sentence_is_tested_and_none_is_hidden_by_an_earlier_one() -> None:
    found = {cause_of(RuntimeError(text)) or loss_of(RuntimeError(text)) for text in TEXTS}
    assert found == {sentence for _, sentence in (*CAUSES, *LOSSES)}


def test_an_unknown_error_is_no_sentence() -> None:
    assert cause_of(RuntimeError("boom")) is None
    assert loss_of(RuntimeError("boom")) is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RuntimeError("Connection reset by peer"),
            f"another rank of this job is lost: {KILLED}. Start",
        ),
        (RuntimeError("boom"), f"another rank of this job is lost: {KILLED}. Start"),
        (RuntimeError("Timed out waiting 1000ms"), "another rank of this job is lost: it did not come in time"),
        (
            RuntimeError("CUDA out of memory"),
            r"a sum over the ranks failed: the memory of a GPU .* \(CUDA out of memory\)",
        ),
    ],
)
def test_an_error_in_a_sum_says_whether_a_rank_is_lost(error: Exception, sentence: str) -> None:
    with pytest.raises(GroupError, match=sentence), lost_ranks_named():
        raise error


@pytest.fixture
def port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def second_rank(monkeypatch: pytest.MonkeyPatch, host: str, port: int, rank: int = 1) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", host), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.mark.slow
def test_a_blocked_port_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    second_rank(monkeypatch, "127.0.0.1", port)
    sentence = (
        rf"rank 1 did not reach the other ranks in 1 s: 127\.0\.0\.1:{port} refuses connections: start rank 0 there"
    )
    with pytest.raises(GroupError, match=sentence), joined(join_s=1.0):
        pass
    assert not dist.is_initialized()


def test_a_port_that_swallows_all_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert unreachable("10.0.0.1", 29500).startswith("nobody answers at 10.0.0.1:29500: a firewall blocks this port")


def test_the_reason_why_a_store_is_not_reached_is_found(port: int) -> None:
    assert unreachable("127.0.0.1", port).startswith(f"127.0.0.1:{port} refuses connections")
    assert unreachable("no such name", port).startswith("the name no such name cannot be resolved")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = int(other.getsockname()[1])
        assert "answers, but not as the store of this job" in unreachable("127.0.0.1", taken)


@pytest.mark.slow
def test_a_first_rank_says_that_others_have_not_come_or_that_its_port_is_taken(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    second_rank(monkeypatch, "127.0.0.1", port, rank=0)
    with pytest.raises(GroupError, match=r"rank 0 could not join .*: not all ranks have come"), joined(join_s=1.0):
        pass
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(GroupError, match="another job has this port on this machine"), joined(join_s=1.0):
            pass
