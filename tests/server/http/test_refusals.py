"""Each way to be wrong has its own problem document and changes nothing."""

import asyncio
import base64
import json
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tests.federations.server_device import (
    Device,
    House,
    LateClock,
    house,
    problem,
    repr_digest,
    rows,
    run_file,
    sha256,
    small_state,
    stored_updates,
    update_of,
)
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.update.wire import UpdateHeader, float32_header

pytestmark = pytest.mark.usefixtures("any_database_in_time")

Refusal = Callable[["Scene"], Awaitable[httpx.Response]]


class Scene:
    """A round with an open window: one client has an assignment, another is enrolled, and a token is unused."""

    def __init__(self, it: House, layout: Layout, devices: list[Device], assignment: str, token: str) -> None:
        self.it = it
        self.layout = layout
        self.device, self.other = devices
        self.assignment = assignment
        self.token = token

    def update(self, value: float = 0.5, at: int = 3) -> bytes:
        values = torch.full((self.layout.n_values,), 0.25)
        values[at] = value
        return update_of(self.layout, values)

    def with_header(self, header: bytes) -> bytes:
        return header + self.update()[64:]

    async def upload(self, update: bytes, **headers: str) -> httpx.Response:
        return await self.device.upload(self.assignment, update, **headers)

    async def check_in(self, **changed: object) -> httpx.Response:
        return await self.other.check_in(self.layout, wait_s=0.0, **changed)

    async def enrol(self, token: str, name: str = "newcomer") -> httpx.Response:
        return await Device(self.it.http, name).enrol(token)


def refused(kind: str, name: str | None = None) -> Callable[[Refusal], Refusal]:
    def keep(refusal: Refusal) -> Refusal:
        CASES[name or refusal.__name__.replace("_", " ")] = (kind, refusal)
        return refusal

    return keep


CASES: dict[str, tuple[str, Refusal]] = {}


@refused("non-finite-update")
async def a_nan(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(float("nan")))


@refused("non-finite-update")
async def an_infinity(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(float("-inf")))


@refused("update-out-of-range")
async def a_value_beyond_the_grid(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(8.5))


@refused("lying-length")
async def a_wrong_shape(scene: Scene) -> httpx.Response:
    return await scene.upload(update_of(scene.layout, torch.zeros(scene.layout.n_values + 1)))


@refused("wrong-layout")
async def a_wrong_layout_digest_in_the_update(scene: Scene) -> httpx.Response:
    header = float32_header(scene.layout)
    other = UpdateHeader(header.codec, header.n_values, bytes(32), header.payload_bytes)
    return await scene.upload(scene.with_header(other.encode()))


@refused("wrong-layout")
async def a_wrong_layout_digest_at_check_in(scene: Scene) -> httpx.Response:
    return await scene.check_in(layout_digest="0" * 64)


@refused("lying-length")
async def a_lying_length_in_the_header(scene: Scene) -> httpx.Response:
    header = bytearray(float32_header(scene.layout).encode())
    struct.pack_into("<Q", header, 8, 1 << 60)
    return await scene.upload(scene.with_header(bytes(header)))


@refused("lying-length")
async def a_lying_upload_length(scene: Scene) -> httpx.Response:
    update = scene.update()
    return await scene.upload(update, **{"Upload-Length": str(len(update) + 4)})


@refused("lying-length")
async def a_body_shorter_than_its_content_length(scene: Scene) -> httpx.Response:
    update = scene.update()
    return await scene.upload(update, **{"Content-Length": str(len(update) + 1)})


@refused("lying-length")
async def a_body_longer_than_its_content_length(scene: Scene) -> httpx.Response:
    update = scene.update()
    return await scene.upload(update, **{"Content-Length": str(len(update) - 1)})


@refused("lying-length")
async def an_update_that_ends_early(scene: Scene) -> httpx.Response:
    update = scene.update()
    return await scene.upload(update[:-4], **{"Upload-Length": str(len(update)), "Repr-Digest": repr_digest(update)})


@refused("malformed-update")
async def a_wrong_magic(scene: Scene) -> httpx.Response:
    return await scene.upload(b"FLWR" + scene.update()[4:])


@refused("wrong-codec")
async def a_codec_nobody_asked_for(scene: Scene) -> httpx.Response:
    update = bytearray(scene.update())
    update[5] = 7
    return await scene.upload(bytes(update))


@refused("wrong-digest")
async def a_repr_digest_of_something_else(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(), **{"Repr-Digest": repr_digest(b"something else")})


@refused("malformed-request")
async def a_repr_digest_that_is_none(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(), **{"Repr-Digest": "md5=:AAAA:"})


@refused("body-too-large")
async def a_chunk_over_the_cap(scene: Scene) -> httpx.Response:
    return await scene.upload(scene.update(), **{"Content-Length": str(1 << 40)})


@refused("body-too-large")
async def a_control_message_over_the_cap(scene: Scene) -> httpx.Response:
    return await scene.other.send("POST", "/v1/check-ins", b" " * (64 * 1024 + 1))


@refused("length-required")
async def a_body_without_a_length(scene: Scene) -> httpx.Response:
    async def pieces() -> object:
        yield b"{}"

    headers = scene.other.headers("POST", "/v1/check-ins", b"{}")
    return await scene.it.http.post("/v1/check-ins", content=pieces(), headers=headers)  # type: ignore[arg-type]


@refused("unknown-run")
async def an_unknown_run(scene: Scene) -> httpx.Response:
    return await scene.check_in(run="nowhere")


@refused("sample-count-needed")
async def a_check_in_without_samples(scene: Scene) -> httpx.Response:
    return await scene.check_in(sample_count=0)


@refused("malformed-request")
async def a_body_that_is_no_json(scene: Scene) -> httpx.Response:
    return await scene.other.send("POST", "/v1/check-ins", b"{" * 50_000)


@refused("token-used")
async def a_token_used_twice(scene: Scene) -> httpx.Response:
    await Device(scene.it.http, "device-9").enrol(scene.token)
    scene_rows = rows(scene.it.settings)
    answer = await scene.enrol(scene.token)
    assert rows(scene.it.settings) == scene_rows
    return answer


@refused("unknown-token")
async def a_token_never_issued(scene: Scene) -> httpx.Response:
    return await scene.enrol("x" * 32)


@refused("name-taken")
async def a_name_that_another_key_has(scene: Scene) -> httpx.Response:
    return await scene.enrol(scene.token, name=scene.other.name)


@refused("key-taken")
async def a_key_that_another_name_has(scene: Scene) -> httpx.Response:
    return await Device(scene.it.http, "newcomer", key=scene.other.key).enrol(scene.token)


@refused("bad-signature")
async def a_client_never_enrolled(scene: Scene) -> httpx.Response:
    return await Device(scene.it.http, "stranger").check_in(scene.layout, wait_s=0.0)


@refused("bad-signature")
async def a_signature_by_another_key(scene: Scene) -> httpx.Response:
    impostor = Device(scene.it.http, scene.other.name, key=Ed25519PrivateKey.generate())
    return await impostor.check_in(scene.layout, wait_s=0.0)


@refused("bad-signature")
async def a_signature_of_another_address(scene: Scene) -> httpx.Response:
    headers = scene.other.headers("GET", f"/v1/assignments/{scene.assignment}", b"")
    return await scene.it.http.get(f"/v1/assignments/{scene.assignment}?wait_s=1", headers=headers)


@refused("malformed-signature")
async def no_signature(scene: Scene) -> httpx.Response:
    return await scene.it.http.post("/v1/check-ins", content=b"{}")


@refused("stale-signature")
async def an_old_signature(scene: Scene) -> httpx.Response:
    headers = scene.other.headers("POST", "/v1/check-ins", b"{}", created=int(time.time()) - 301)
    answer = await scene.it.http.post("/v1/check-ins", content=b"{}", headers=headers)
    assert "Date" in answer.headers
    return answer


@refused("replayed-nonce")
async def a_nonce_seen_before(scene: Scene) -> httpx.Response:
    url = f"/v1/assignments/{scene.assignment}"
    headers = scene.device.headers("GET", url, b"")
    first = await scene.it.http.get(url, headers=headers)
    assert first.status_code == 200
    return await scene.it.http.get(url, headers=headers)


@refused("wrong-digest")
async def a_body_other_than_the_signed_one(scene: Scene) -> httpx.Response:
    headers = scene.other.headers("POST", "/v1/check-ins", b'{"run": "demo"}')
    return await scene.it.http.post("/v1/check-ins", content=b'{"run": "dem0"}', headers=headers)


@refused("unknown-assignment")
async def an_assignment_of_another_client(scene: Scene) -> httpx.Response:
    return await scene.other.upload(scene.assignment, scene.update())


@refused("unknown-upload")
async def a_chunk_of_an_upload_never_begun(scene: Scene) -> httpx.Response:
    return await scene.device.patch(scene.assignment, b"1234", 0, is_last=False)


@refused("upload-incomplete")
async def a_report_without_an_update(scene: Scene) -> httpx.Response:
    return await scene.device.report(scene.assignment, b"")


@refused("report-refused")
async def a_sample_count_over_the_cap(scene: Scene) -> httpx.Response:
    return await scene.device.report(scene.assignment, b"", sample_count=1001)


@refused("malformed-request")
async def more_steps_than_planned(scene: Scene) -> httpx.Response:
    return await scene.device.report(scene.assignment, b"", steps_done=5)


@refused("unknown-model")
async def an_unknown_model(scene: Scene) -> httpx.Response:
    return await scene.device.send("GET", f"/v1/models/{'0' * 64}")


@refused("not-found")
async def a_path_instead_of_a_model(scene: Scene) -> httpx.Response:
    return await scene.device.send("GET", "/v1/models/..%2F..%2Fadmin.key")


@refused("admin-key-refused")
async def a_wrong_admin_key(scene: Scene) -> httpx.Response:
    headers = {"Authorization": "Bearer " + "x" * 43}
    return await scene.it.http.post("/v1/admin/tokens", json={"count": 1}, headers=headers)


@refused("admin-key-refused")
async def no_admin_key(scene: Scene) -> httpx.Response:
    return await scene.it.http.get("/v1/admin/runs")


@refused("run-exists")
async def a_second_run_of_the_same_name(scene: Scene) -> httpx.Response:
    answer = await scene.it.put_run(run_file(count=9), await scene.it.put_model(small_state()))
    assert "A run cannot be changed: give this one another name" in answer.json()["detail"]
    return answer


@refused("unknown-model")
async def a_run_from_an_unknown_model(scene: Scene) -> httpx.Response:
    return await scene.it.put_run(run_file().replace("demo", "second"), "0" * 64, name="second")


@refused("malformed-request")
async def a_run_file_with_an_unknown_key(scene: Scene) -> httpx.Response:
    answer = await scene.it.put_run(run_file() + "typo = 1\n", "0" * 64)
    assert "aggregation.typo" in answer.json()["detail"]
    return answer


@refused("malformed-request")
async def a_model_that_is_no_safetensors(scene: Scene) -> httpx.Response:
    data = b"\xff" * 100
    return await scene.it.http.put(f"/v1/admin/models/{sha256(data)}", content=data, headers=scene.it.admin)


@refused("not-found")
async def an_address_that_is_not_there(scene: Scene) -> httpx.Response:
    return await scene.it.http.get("/v1/nowhere")


@refused("method-not-allowed")
async def a_method_that_is_not_taken(scene: Scene) -> httpx.Response:
    return await scene.it.http.put("/v1/check-ins", content=b"{}")


@refused("malformed-request")
async def a_query_that_does_not_parse(scene: Scene) -> httpx.Response:
    answer = await scene.device.send("GET", f"/v1/assignments/{scene.assignment}?wait_s=soon")
    assert "wait_s" in answer.json()["detail"]
    return answer


@refused("malformed-request")
async def a_public_key_that_is_none(scene: Scene) -> httpx.Response:
    body = {"token": scene.token, "client": "newcomer", "public_key": base64.b64encode(b"short").decode()}
    return await Device(scene.it.http, "newcomer").send("POST", "/v1/enrolments", json.dumps(body).encode())


@refused("malformed-request")
async def a_public_key_whose_signatures_anyone_can_make(scene: Scene) -> httpx.Response:
    identity, any_message = bytes([1]) + bytes(31), b"whatever"
    constant = identity + bytes(32)
    Ed25519PublicKey.from_public_bytes(identity).verify(constant, any_message)  # which is why
    body = {"token": scene.token, "client": "newcomer", "public_key": base64.b64encode(identity).decode()}
    text = json.dumps(body).encode()
    signed = Device(scene.it.http, "newcomer").headers("POST", "/v1/enrolments", text)
    signed["Signature"] = f"umbel=:{base64.b64encode(constant).decode()}:"
    return await scene.it.http.post("/v1/enrolments", content=text, headers=signed)


@refused("malformed-request")
async def a_count_that_is_true(scene: Scene) -> httpx.Response:
    return await scene.check_in(sample_count=True)


@refused("malformed-request")
async def a_count_in_quotes(scene: Scene) -> httpx.Response:
    return await scene.check_in(sample_count="3")


@refused("malformed-request")
async def a_run_file_with_a_count_that_is_true(scene: Scene) -> httpx.Response:
    return await scene.it.put_run(run_file().replace("count = 1\n", "count = true\n", 1), "0" * 64)


@refused("malformed-request")
async def a_run_file_with_a_number_of_thousands_of_digits(scene: Scene) -> httpx.Response:
    return await scene.it.put_run("seed = " + "9" * 5000, "0" * 64)


@refused("malformed-request")
async def a_run_file_with_a_hexadecimal_number_of_thousands_of_digits(scene: Scene) -> httpx.Response:
    return await scene.it.put_run("seed = 0x" + "f" * 6000, "0" * 64)


@refused("malformed-request")
async def a_run_file_with_a_date(scene: Scene) -> httpx.Response:
    return await scene.it.put_run("seed = 2024-01-01", "0" * 64)


@refused("body-too-large")
async def a_run_file_that_takes_long_to_read(scene: Scene) -> httpx.Response:
    return await scene.it.put_run(".".join(["a"] * 8200) + "=1", "0" * 64)


@refused("admin-key-refused")
async def an_empty_admin_key(scene: Scene) -> httpx.Response:
    return await scene.it.http.get("/v1/admin/runs", headers={"Authorization": "Bearer "})


@pytest.mark.parametrize("name", CASES)
def test_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    kind, refusal = CASES[name]

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            devices = await it.devices(2)
            assignment = await devices[0].work(layout)
            [token] = await it.tokens(1)
            scene = Scene(it, layout, devices, assignment["id"], token)
            before = rows(it.settings)
            answer = await refusal(scene)
            assert problem(answer) == kind, answer.text
            if kind != "token-used":  # which checks by itself, after the token's first use
                assert rows(it.settings) == before
            assert stored_updates(it.settings) == []
            update = scene.update()
            assert (await scene.upload(update)).status_code == 201
            assert (await devices[0].report(scene.assignment, update)).json()["outcome"] == "accepted"

    asyncio.run(scenario())


def test_an_expired_token_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            [token] = await it.tokens(1, ttl_s=10.0)
            clock.late_s = 11.0
            assert problem(await Device(it.http, "newcomer").enrol(token)) == "expired-token"

    asyncio.run(scenario())
