"""`umbel doctor`: each thing that would keep a client from its work is found, under its own name."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.servers.tls_server import Server, issued, serving
from umbel.__main__ import app, mount
from umbel.client.check.site_checks import check_site
from umbel.client.findings import ClientCheck
from umbel.client.state.home import Home
from umbel.client.state.identity import make_own_key

HEALTHY = b'{"status":"ok"}'
NO_STATE = Path("/nonexistent/state")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", *(f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL", "NO"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def said(check: ClientCheck, name: str) -> tuple[str, str]:
    """The verdict of this check, and what it found with its advice."""
    (one,) = [one for one in check.findings if one.check == name]
    return one.verdict, f"{one.found} | {one.advice}"


def asked(server: Server, scheme: str = "https") -> ClientCheck:
    return check_site(f"{scheme}://127.0.0.1:{server.server_port}", NO_STATE, None)


@pytest.mark.parametrize(("last_day", "verdict"), [(60, "pass"), (3, "warning")])
def test_a_coordinator_over_tls_shows_its_certificates_last_day(
    last_day: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = issued(tmp_path, last_day=last_day)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server:
        server.body = HEALTHY
        found = asked(server)
    assert not found.wrong, str(found)
    assert said(found, "coordinator")[0] == "pass"
    assert "directly" in said(found, "coordinator")[1]
    assert "TLSv1." in said(found, "coordinator")[1]
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + last_day * 86_400))
    assert said(found, "certificate")[0] == verdict
    assert "Ward CA issued it" in said(found, "certificate")[1]
    assert day[:8] in said(found, "certificate")[1]
    assert said(found, "clock")[0] == "pass"


def test_a_ca_that_is_not_trusted_is_wrong_and_names_the_variable(tmp_path: Path) -> None:
    with serving(issued(tmp_path)) as server:
        verdict, words = said(asked(server), "coordinator")
    assert verdict == "wrong"
    assert "Set SSL_CERT_FILE" in words


def test_another_service_at_the_address_is_no_coordinator() -> None:
    with serving(None) as server:
        verdict, words = said(asked(server, "http"), "coordinator")
    assert verdict == "wrong"
    assert "not as a coordinator does" in words


@pytest.mark.parametrize("ahead_s", [-400.0, 400.0])
def test_a_clock_that_is_wrong_is_found_before_the_first_signed_request(ahead_s: float) -> None:
    with serving(None) as server:
        server.body, server.ahead_s = HEALTHY, ahead_s
        verdict, words = said(asked(server, "http"), "clock")
    assert verdict == "wrong"
    assert "by +4" in words if ahead_s < 0 else "by -" in words


def test_all_addresses_of_replicas_are_asked() -> None:
    with serving(None) as server:
        server.body, port = HEALTHY, server.server_port
        found = check_site(f"http://127.0.0.1:{port},http://coordinator.invalid", NO_STATE, None)
    assert [one.verdict for one in found.findings if one.check == "coordinator"] == ["pass", "wrong"]


def refusal(status: int, kind: str, detail: str) -> tuple[int, bytes]:
    fields = {"type": f"urn:umbel:problem:{kind}", "title": kind, "status": status, "detail": detail}
    return status, json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        (refusal(404, "unknown-assignment", "none"), "pass", "accepts the signature of ward"),
        (
            refusal(403, "client-removed", "enrol under a new name"),
            "wrong",
            "enrol under a new name | starting the client again",
        ),
        (refusal(401, "bad-signature", "no"), "wrong", "(bad-signature): no | check this machine's clock"),
        (refusal(503, "shutting-down", "soon"), "warning", "soon | run this command again"),
    ],
)
def test_a_client_that_the_coordinator_refuses_is_wrong(
    answer: tuple[int, bytes], verdict: str, words: str, tmp_path: Path
) -> None:
    with serving(None) as server:
        server.body, server.refuses = HEALTHY, {"/v1/assignments/-.0.0.ward?": answer}
        url = f"http://127.0.0.1:{server.server_port}"
        make_own_key(tmp_path, url)
        assert said(check_site(url, tmp_path, None), "enrolment")[0] == "skipped", "not enrolled yet"
        Home(tmp_path, url).remember_enrolment("ward")
        found = said(check_site(url, tmp_path, None), "enrolment")
    assert found[0] == verdict
    assert words in found[1]


def test_the_state_directory_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    state = tmp_path / "state"
    make_own_key(state, "https://fl.example.org")
    (key,) = state.glob("*/key.pem")
    closed = check_site(None, state, None)
    assert said(closed, "state directory")[0] == said(closed, "key")[0] == "pass"
    assert "not enrolled yet; fingerprint " in said(closed, "key")[1]
    secret = key.read_text().splitlines()[1]
    assert secret not in str(closed)
    state.chmod(0o755)
    assert said(check_site(None, state, None), "state directory")[0] == "warning"
    assert state.stat().st_mode & 0o777 == 0o755
    key.write_text("no key")
    assert "damaged" in "".join(one.found for one in check_site(None, state, None).wrong)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    found = check_site(None, tmp_path / "state", None)
    assert said(found, "state directory")[0] == "skipped"
    assert not (tmp_path / "state").exists()


def test_a_directory_that_cannot_be_looked_into_is_wrong_and_the_other_checks_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = check_site(None, tmp_path / "file" / "state", None)
    assert said(found, "state directory")[0] == "wrong"
    assert "run this command as the client's user" in said(found, "state directory")[1]
    assert said(found, "disk")[0] in ("pass", "warning")


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        ('allowed_runs = ["ward"]', "warning", "; allowed runs: ward; other runs: refuse"),
        ('denied_runs = ["eeg-*", "mri"]', "warning", "; denied runs: eeg-*, mri; other runs: ask"),
        ("minimum_cohrt = 4", "wrong", "minimum_cohort"),
        ('members = "list.json"', "wrong", "list.json, which is not there"),
    ],
)
def test_a_policy_that_would_stop_the_client_is_wrong(text: str, verdict: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    found = said(check_site(None, tmp_path / "state", tmp_path / "site.toml"), "policy")
    assert found[0] == verdict
    assert words in found[1]


def test_the_command_ends_with_status_1_if_something_is_wrong(tmp_path: Path) -> None:
    mount()
    (tmp_path / "site.toml").write_text("wrong = 1")
    state = ["--state", str(tmp_path / "state")]
    good = CliRunner().invoke(app, ["doctor", *state], env={"UMBEL_SERVER": None})
    bad = CliRunner().invoke(app, ["doctor", *state, "--policy", str(tmp_path / "site.toml"), "--json"])
    assert good.exit_code == 0, good.output
    assert "versions" in good.output
    assert bad.exit_code == 1
    assert "policy" in {one["check"] for one in json.loads(bad.output)["findings"] if one["verdict"] == "wrong"}


@pytest.mark.parametrize("year", ["99999999999", "2026 99999999999999999999:00:00"])
def test_a_date_of_many_digits_tells_no_time(year: str) -> None:
    with serving(None) as server:
        server.body, server.date = HEALTHY, f"Mon, 01 Jan {year} 00:00:00 GMT"
        found = asked(server, "http")
    assert said(found, "coordinator")[0] == "pass"
    assert not [one for one in found.findings if one.check == "clock"]
