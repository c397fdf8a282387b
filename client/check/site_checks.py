"""The checks of `umbel doctor`: whether this machine is ready for a client, and whether the coordinator still accepts
the client that is enrolled here. They change nothing, and tell no secret.
"""

import os
import platform
import shutil
import ssl
import stat
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import torch

from umbel.aggregation.kernels.native import NoKernels, chosen
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.types import ClientId, RunId
from umbel.client.errors import AccessRefused, AssignmentClosed, ClientError, StateError, printable
from umbel.client.files import require_own
from umbel.client.findings import ClientCheck, ClientFinding, passed, skipped, warned, wrong
from umbel.client.policy.policy import SitePolicy, read_policy
from umbel.client.state.enrol import CLOCK_WARNING_S
from umbel.client.state.identity import enrolled_identity, own_keys
from umbel.client.wire.addresses import addresses_in, is_readable
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.reach import Reached, reach
from umbel.client.wire.transport import Transport, at_any_address, connect

FREE_BYTES_MIN = 2 << 30
CERTIFICATE_DAYS_MIN = 21
_DAY_S = 86_400.0
_NO_RUN = RunId("-")  # no run can have this name
_SIGNATURE_ADVICE = "check this machine's clock; if it is right, send this output to the coordinator's operator"


def check_site(server: str | None, state: Path, policy: Path | None) -> ClientCheck:
    """Check the installation, the state directory, the policy, the way to the coordinator, and the enrolment there.

    Raises `ValueError` for a server that is no address.

    Args:
        server: `URL[,URL...]`; None leaves out the coordinator.
        state: the client's state directory, which need not exist.
        policy: the site's policy, if it has one.
    """
    addresses = () if server is None else addresses_in(server)
    found = [*_installation(), *_disk(state), *_state(state), _policy(policy)]
    for address in addresses:
        found += _coordinator(address)
    if server is None:
        found.append(skipped("coordinator", "no address was given (--server)"))
    elif any(one.check == "coordinator" and one.verdict != "wrong" for one in found):
        found.append(_enrolment(server, state))
    return ClientCheck(tuple(found))


def _installation() -> Iterator[ClientFinding]:
    software = f"Python {platform.python_version()}, PyTorch {torch.__version__}, {ssl.OPENSSL_VERSION}"
    yield passed("versions", f"umbel {version('umbel')}, {software}, {platform.platform()}")
    try:
        kernels = chosen()
        how = "compiled" if kernels is not None else "PyTorch's, which are slower"
        yield passed("kernels", f"the codec's kernels are {how}")
    except NoKernels as error:
        yield wrong("kernels", str(error), "correct the variable, or install umbel again")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield passed("GPU", ", ".join(names) or "PyTorch finds none, so training uses the CPU")


def _disk(state: Path) -> Iterator[ClientFinding]:
    place = next(one for one in (state.absolute(), *state.absolute().parents) if os.path.exists(one))
    free = shutil.disk_usage(place).free
    said = f"{free / 1e9:.1f} GB are free at {place}"
    if free < FREE_BYTES_MIN:
        yield warned("disk", said, "a client needs space for two models, two updates and a checkpoint: free some")
    else:
        yield passed("disk", said)


def _state(state: Path) -> Iterator[ClientFinding]:
    try:
        require_own(state, found := state.stat())
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            said = f"other users can enter {state} (mode {stat.S_IMODE(found.st_mode):o})"
            yield warned("state directory", said, f"the client closes it at its start; or run `chmod 700 {state}`")
        else:
            yield passed("state directory", f"{state} is closed to other users")
        if not any(state.glob("*/key.pem")):
            yield skipped("key", "there is none yet; the client makes it at its first start")
            return
        for key in own_keys(state):
            who = f"{key.client} at {key.server}" if key.client else "not enrolled yet"
            yield passed("key", f"{who}; fingerprint {key.fingerprint}")
    except FileNotFoundError:
        yield skipped("state directory", f"{state} does not exist yet; the client makes it")
    except (StateError, OSError) as error:
        yield wrong("state directory", str(error), f"run this command as the client's user (now user {os.geteuid()})")


def _policy(path: Path | None) -> ClientFinding:
    if path is None:
        return skipped("policy", "none was given (--policy); without one the coordinator sets all limits")
    try:
        policy = read_policy(path)
    except (OSError, ValueError) as error:
        return wrong("policy", str(error), "the client does not start with this file: correct it")
    if policy.members is not None and not policy.members.exists():
        return wrong("policy", f"{path} names the member list {policy.members}, which is not there", "put it there")
    if policy.members is None:
        return warned(
            "policy",
            f"{path}: rounds without masks only, because it names no member list; {_runs(policy)}",
            'if the site shall take part in runs with secure aggregation, set members = "FILE" in the policy',
        )
    masks = "masked rounds only" if policy.requires_secure_rounds else "rounds with and without masks"
    return passed("policy", f"{path}: {masks}, the member list {policy.members}; {_runs(policy)}")


def _runs(policy: SitePolicy) -> str:
    """Which runs the policy allows, denies, and leaves to `other_runs`."""
    named = {"allowed": policy.allowed_runs, "denied": policy.denied_runs}
    lists = [f"{what} runs: {', '.join(patterns)}" for what, patterns in named.items() if patterns]
    return "; ".join([*lists, f"other runs: {policy.rule_for_other_runs}"])


def _coordinator(address: str) -> Iterator[ClientFinding]:
    try:
        reached = reach(address)
    except (ClientError, ValueError) as error:
        yield wrong("coordinator", printable(str(error)), f"a client on this machine cannot work with {address}")
        return
    way = "directly" if reached.proxy is None else f"through the proxy {reached.proxy}"
    said = f"{address} answered {way} after {reached.took_s:.1f} s"
    if is_readable(address):
        yield warned("coordinator", f"{said}, without encryption", "use an address with https://")
    else:
        yield passed("coordinator", f"{said}, over {reached.tls}" if reached.tls else said)
    yield from _certificate(reached)
    if reached.ahead_s is not None:
        yield _clock(reached.ahead_s)


def _enrolment(server: str, state: Path) -> ClientFinding:
    """Ask with this client's signature for an assignment that cannot exist. The coordinator only notes the contact."""
    try:
        identity = enrolled_identity(state, server)
    except (StateError, OSError):
        return skipped("enrolment", "this client's enrolment or key cannot be read: see the state directory")
    if identity is None:
        return skipped("enrolment", "this client is not enrolled with this coordinator yet")
    nobodys = assignment_id(_NO_RUN, 0, 0, ClientId(identity.name))
    with connect(server) as replicas:
        coordinator = CoordinatorClient(Transport(replicas, identity.authorize))
        try:
            at_any_address(lambda: coordinator.status(nobodys))
        except AssignmentClosed:  # it comes after the signature was verified
            return passed("enrolment", f"the coordinator accepts the signature of {identity.name}")
        except AccessRefused as error:
            advice = "starting the client again does not help" if error.is_final else _SIGNATURE_ADVICE
            return wrong("enrolment", printable(f"{identity.name}: {error}"), advice)
        except ClientError as error:
            return warned("enrolment", printable(str(error)), "run this command again later")
    return wrong("enrolment", "the coordinator knows an assignment that cannot exist", "tell its operator")


def _certificate(reached: Reached) -> Iterator[ClientFinding]:
    if reached.expires_at is None:
        return
    days = (reached.expires_at - time.time()) / _DAY_S
    day = time.strftime("%Y-%m-%d", time.gmtime(reached.expires_at))
    said = f"that of {urlsplit(reached.address).hostname} is valid until {day}; {printable(reached.issuer)} issued it"
    if days < CERTIFICATE_DAYS_MIN:
        yield warned("certificate", said, "ask the coordinator's operator to renew it")
    else:
        yield passed("certificate", said)


def _clock(ahead_s: float) -> ClientFinding:
    said = f"this machine's clock differs from the coordinator's by {ahead_s:+.0f} s"
    if abs(ahead_s) > CLOCK_WARNING_S:
        return wrong("clock", said, "set it, for example by NTP: the coordinator refuses requests with another time")
    return passed("clock", said)
